r"""DP-DeepSets (Nishikawa et al. 2026): from a private set to network parameters by one noisy mean.

$$ \omega = \phi_2(e), \qquad e = \frac1N \Bigl( \sum_n \mathrm{clip}_C(\phi_1(p_n) - c) + \xi
   \Bigr) $$

The encoder $\phi_1$, the decoder $\phi_2$ and the centre c are learnt on PUBLIC sets, with the same
noise. A private set is read once, in `private_embedding`; any number of models made of one e is
free of charge, a second e is not.

    plan = plan_embedding(128, epsilon=1.0, delta=1e-5, adjacency="replace-one")
    num_tokens, detokenise = flat_tokens(target_params, token_size=128)
    net = Hypernet(MLPEncoder((256, 128)), TransformerDecoder(num_tokens, 128), detokenise,
                   num_records=plan.batch_size, noise_multiplier=plan.noise_multiplier)
    tx = optax.adam(warmup_cosine(1e-3, steps=10_000))
    state = init_training(net, tx, key, public_records)
    step = jax.jit(train_step(net, loss, tx))     # state, losses = step(state, public tasks)
    ...
    generated = net.generate(state.params, private_records, jdp.secure_key())
    print(plan.report())
"""

from jdp.hypernet_model import Hypernet as Hypernet
from jdp.hypernet_model import HypernetParams as HypernetParams
from jdp.hypernet_model import flat_tokens as flat_tokens
from jdp.hypernet_networks import LinearDecoder as LinearDecoder
from jdp.hypernet_networks import MLPEncoder as MLPEncoder
from jdp.hypernet_networks import TransformerDecoder as TransformerDecoder
from jdp.hypernet_training import Tasks as Tasks
from jdp.hypernet_training import TrainState as TrainState
from jdp.hypernet_training import init_training as init_training
from jdp.hypernet_training import train_step as train_step
from jdp.hypernet_training import warmup_cosine as warmup_cosine
from jdp.set_embedding import EmbeddingPlan as EmbeddingPlan
from jdp.set_embedding import plan_embedding as plan_embedding
from jdp.set_embedding import private_embedding as private_embedding
