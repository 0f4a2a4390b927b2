"""Train for long, and see that memory stays what it was: `python -m tests.soak --minutes 60`.

One process takes private steps of DP-SGD and GEP without end, charges a ledger, saves checkpoints,
draws batches of a million records, accounts and calibrates, as a long run with its monitoring does.
After a warm-up (a tenth of the time, a minute at most) the resident memory of every later tenth is
compared with that of the first: it must stay within 2%. Prints one line a tenth; exit status 1 if
memory grew.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import optax

import jdp

ALLOWED = 0.02
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident():
    """Bytes of this process in memory."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def loss(w, example):
    logits = jnp.tanh(example[0] @ w["inner"]) @ w["outer"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, example[1])


def program(private, x, y, plan):
    """A step of a method, and its first state."""
    w = {"inner": jnp.ones((64, 64)) / 8, "outer": jnp.zeros((64, 10))}
    keys = jax.random.split(jax.random.key(0), 3)
    public = jdp.random_label_gradients(loss, x[:50], num_classes=10)
    own = {"batch_size": plan.batch_size, "key": keys[0]}
    z = plan.noise_multiplier
    if private == "gep":
        tx = jdp.gep(
            rank=20, clip_norms=(1.0, 0.2), noise_multiplier=z, public_gradients=public,
            loss=loss, refresh_every=10, warm_start=True, **own,
        )  # fmt: skip
    else:
        tx = jdp.privatize(z, **own)
    tx = optax.chain(tx, optax.sgd(0.1, momentum=0.9))
    grad = jdp.clipped_grad(loss, jdp.clip_by_norm(1.0))

    def step(i, state):
        w, inner, key = state
        rows, mask = plan.batch(key, i)
        batch = x[rows], y[rows]
        given = batch if private == "gep" else grad(w, batch, mask=mask)
        updates, inner = tx.update(given, inner, w, **({"mask": mask} if private == "gep" else {}))
        return optax.apply_updates(w, updates), inner, key

    return step, (w, tx.init(w), keys[1])


def aside(turn):
    """What happens beside training: sampling for random access, and accounting."""
    jdp.sampling.PoissonSampling(1_000_000, 256 / 1_000_000).host_batch(jax.random.key(1), turn)
    options = {"delta": 1e-5, "steps": 1_000 + turn, "sampling_rate": 0.01}
    jdp.accounting.calibrate_noise_multiplier(1.0 + turn % 7, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=int, default=50, help="steps of a chunk")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds to a checkpoint")
    args = parser.parse_args()
    x = jax.random.normal(jax.random.key(2), (2_000, 64))
    y = jnp.arange(2_000) % 10
    plan = jdp.plan(2_000, 64, 1_000_000, noise_multiplier=4.0, delta=1e-5)
    seconds = 60 * args.minutes
    warm = min(60.0, seconds / 10)
    begun = time.monotonic()
    samples, steps, turn, shown = [], 0, 0, 0
    with tempfile.TemporaryDirectory() as folder, jdp.Ledger(folder) as ledger:
        runs = []
        for name in ("dp-sgd", "gep"):
            step, state = program(name, x, y, plan)
            run = jdp.ResumableRun(
                ledger, plan, state, step, data="noise", name=name, save_every=args.save_every
            )
            advance = jax.jit(
                lambda start, stop, state, step=step: jax.lax.fori_loop(start, stop, step, state)
            )
            runs.append((run, advance, run.chunks(args.every)))
        while (now := time.monotonic() - begun) < seconds:
            for run, advance, chunks in runs:
                start, stop = next(chunks)
                run.state = jax.block_until_ready(advance(start, stop, run.state))
                steps += stop - start
            if turn % 20 == 0:
                aside(turn)
            turn += 1
            if now >= warm:
                samples.append((now, resident()))
            tenth = int(10 * now / seconds)
            if tenth > shown:
                shown = tenth
                size = resident() / 2**20
                print(f"{now / 60:.1f} min, {steps:,} steps, {size:.0f} MiB", flush=True)
        for *_, chunks in runs:
            chunks.close()
    tenths = [[] for _ in range(9)]
    for when, size in samples:
        tenths[min(int(9 * (when - warm) / (seconds - warm)), 8)].append(size)
    medians = [statistics.median(sizes) for sizes in tenths if sizes]
    growth = max(medians) / medians[0] - 1
    found = {"minutes": args.minutes, "steps": steps, "growth": round(growth, 4)}
    print(json.dumps(found | {"mebibytes": [round(size / 2**20, 1) for size in medians]}))
    return int(growth > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
