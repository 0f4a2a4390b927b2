"""What public data, or a random choice, can do for private training, by one name.

Before the clip, as clippers: random sparsification (`clip_sparsified`) and AdaDPS
(`clip_preconditioned`). After the noise, as optax transformations: projected DP-SGD
(`project_updates`) and PDA-DPMD (`mix_public`). Gradient embedding perturbation is `jdp.gep`.
"""

from jdp.mirror_descent import cosine_mixing as cosine_mixing
from jdp.mirror_descent import mean_gradient as mean_gradient
from jdp.mirror_descent import mix_public as mix_public
from jdp.preconditioning import clip_preconditioned as clip_preconditioned
from jdp.preconditioning import clip_sparsified as clip_sparsified
from jdp.preconditioning import inverse_root as inverse_root
from jdp.preconditioning import random_coordinates as random_coordinates
from jdp.projection import project_updates as project_updates
