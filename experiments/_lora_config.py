"""Sizes of the study of generated adapters: one that two cores can run, and the paper's."""

import dataclasses
from typing import Any

from experiments import _unet
from experiments._lora_baselines import Setting
from experiments._unet import UNetConfig


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that is not an option of the command line.

    Attributes:
      dataset: halved into a public and a private part.
      num_public: images of the public part.
      num_private: images of the private part.
      set_size: N, records of each public or private set.
      unet: the diffusion model.
      levels: its noise levels.
      pretrain_steps: training of the diffusion model on the public images.
      pretrain_batch: images a step.
      pretrain_rate: Adam's learning rate.
      classifier_steps: training of the network behind the features.
      patterns: which matrices have adapters.
      rank: of the adapters.
      first_level: noise levels from this one on are used to train adapters.
      encoder: widths of the encoder; the last one is that of the embedding.
      linear: a linear decoder instead of a transformer.
      decoder_width: of the transformer; its hidden layers have four times as many.
      decoder_layers: of the transformer.
      hyper_steps: training of the hypernetwork.
      hyper_sets: public sets a step.
      hyper_records: records of each set in the loss of a step.
      hyper_rate: Adam's largest learning rate.
      token_scale: what the decoder's tokens are multiplied by. Adam moves a token of a linear
        decoder by up to its rate times the width of the embedding a step; with a scale of 1 that
        is as much as the adapters themselves, and training ends worse than it began.
      baseline: training of adapters by gradients.
      tuning_sets: public sets on which learning rates are chosen.
      tuning_samples: images sampled for that.
      candidates: points of the private part among which representatives are chosen.
    """

    dataset: str = "mnist"
    num_public: int = 30_000
    num_private: int = 30_000
    set_size: int = 128
    unet: UNetConfig = _unet.SMALL
    levels: int = 1_000
    pretrain_steps: int = 3_000
    pretrain_batch: int = 64
    pretrain_rate: float = 2e-3
    classifier_steps: int = 2_000
    patterns: tuple[str, ...] = ("*/qkv/kernel", "*/proj_out/kernel", "*/emb/kernel")
    rank: int = 1
    first_level: int = 200
    encoder: tuple[int, ...] = (256, 32)
    linear: bool = True
    decoder_width: int = 64
    decoder_layers: int = 2
    hyper_steps: int = 2_000
    hyper_sets: int = 16
    hyper_records: int = 4
    hyper_rate: float = 2e-3
    token_scale: float = 0.3
    baseline: Setting = Setting()
    tuning_sets: int = 2
    tuning_samples: int = 128
    candidates: int = 1_000

    def part(self, *names: str) -> dict[str, Any]:
        """Some of the fields as plain values: what a stage depends on."""
        values = dataclasses.asdict(self)
        return {name: values[name] for name in names}


SMALL = Config()
SMOKE = dataclasses.replace(
    SMALL,
    dataset="mnist-5k",
    num_public=1_000,
    num_private=1_000,
    set_size=16,
    unet=dataclasses.replace(SMALL.unet, width=8, multipliers=(1,), attention=(8,), groups=4),
    pretrain_steps=5,
    pretrain_batch=8,
    classifier_steps=20,
    encoder=(16, 16),
    decoder_width=8,
    decoder_layers=1,
    hyper_steps=4,
    hyper_sets=2,
    hyper_records=2,
    baseline=Setting(steps=2, batch_size=4, learning_rates=(1e-2, 3e-2), free_steps=2),
    tuning_sets=1,
    tuning_samples=72,
    candidates=50,
)
FULL = Config(
    dataset="cifar10",
    num_public=30_000,
    num_private=20_000,
    unet=_unet.IMAGENET_64,
    levels=4_000,
    patterns=("*/qkv/kernel", "*/proj_out/kernel"),
    first_level=0,
    encoder=(512, 128),
    linear=False,
    token_scale=1.0,
    hyper_rate=1e-3,
    decoder_width=128,
    decoder_layers=4,
    hyper_steps=200 * 30_000 // 4,
    hyper_sets=4,
    hyper_records=128,
    baseline=Setting(steps=400, free_steps=3_000, learning_rates=(1e-3, 3e-3, 1e-2, 3e-2)),
    tuning_sets=8,
    tuning_samples=1_024,
    candidates=5_000,
)
CONFIGS = {"small": SMALL, "full": FULL}
