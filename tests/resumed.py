"""Programs that `test_resume.py` kills: `python resumed.py PROGRAM FOLDER`.

A program is `loop`, `gep` (the experiment with several methods), or one of its methods.

Whatever is charged must be charged first: each range of steps is noted in FOLDER/taken when its
work begins. Keys are fixed for a run without a checkpoint, and worthless for one that has one: who
does not resume cannot end as the uninterrupted run. The state at the end goes to FOLDER/*.npz.
"""

import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jdp
from jdp import _store, checkpoints

METHODS = ("non-private", "dp-sgd", "gep", "class-means")


def note(folder, name, stop):
    with open(folder / "taken", "a") as file:
        file.write(f"{name} {stop}\n")


def first_keys(folder, name):
    """Three keys: the same ones in every process, until there is something to resume."""
    steps = (folder / checkpoints.FOLDER / name).glob("*/commit_success.txt")
    resumable = any(path.parent.name.isdigit() for path in steps)
    return jax.random.split(jax.random.key(os.getpid() if resumable else 7), 3)


def write_state(file, leaves):
    partial = file.with_suffix(".part")
    with open(partial, "wb") as out:
        np.savez(out, **leaves)
    partial.rename(file)


def loop(folder):
    """The loop of the README, in small."""
    x, y = (jnp.asarray(part[:1500], jnp.float32) for part in load_digits(return_X_y=True))
    plan = jdp.plan(num_examples=1500, batch_size=100, steps=120, epsilon=2.0, delta=1e-5)

    def loss(w, example):
        logits = example[0] @ w / 16
        return optax.softmax_cross_entropy_with_integer_labels(logits, example[1].astype(jnp.int32))

    grad = jdp.clipped_grad(loss, jdp.clip_by_norm(1.0))
    noise_key, sampling_key, _ = first_keys(folder, "run")
    noised = jdp.privatize(plan.noise_multiplier, batch_size=100, key=noise_key)
    tx = optax.chain(noised, optax.sgd(0.5, momentum=0.9))

    def step(i, state):
        w, inner, key = state
        rows, mask = plan.batch(key, i)
        updates, inner = tx.update(grad(w, (x[rows], y[rows]), mask=mask), inner, w)
        return optax.apply_updates(w, updates), inner, key

    advance = jax.jit(lambda start, stop, state: jax.lax.fori_loop(start, stop, step, state))
    w = jnp.zeros((64, 10))
    state = w, tx.init(w), sampling_key
    with jdp.Ledger(folder) as ledger:
        run = jdp.ResumableRun(ledger, plan, state, step, data="digits", save_every=0)
        for start, stop in run.chunks(4):
            note(folder, "run", stop)
            run.state = jax.block_until_ready(advance(start, stop, run.state))
        write_state(folder / "run.npz", {"w": run.state[0], "steps": run.state[1][0].step})


def gep(folder, methods):
    """The experiment, on small data."""
    from experiments import _run, gep

    class Noted(jdp.ResumableRun):
        def chunks(self, every):
            for start, stop in super().chunks(every):
                note(folder, self._name, stop)
                yield start, stop

    def keep(out, name):
        files = _store.Store(out / checkpoints.FOLDER / name, 3)
        found = files.newest()
        files.close()
        if found is not None and not (out / f"{name}.npz").exists():  # else half deleted
            write_state(out / f"{name}.npz", found[1])
        _store.delete(out / checkpoints.FOLDER / name)

    args = gep.Args(dataset="digits", smoke=True, methods=methods, out=folder, save_every=0.0)
    steps = {"steps": 60, "rank": 8, "refresh_every": 2, "warm_start": True, "eval_every": 3}
    args = gep.dataclasses.replace(args, smoke=False, max_examples=200, seeds=1, **steps)
    args = gep.dataclasses.replace(args, batch_size=32, teachers=10, queries=20)
    jdp.ResumableRun = Noted
    gep.checkpoints.discard = keep
    names = iter(args.methods)
    done = _run.Folder(folder, "gep")._pieces
    left = [name for name in names if f"{name}/0" not in done]
    _run.keys = lambda seed, repeat: _run.Keys(*first_keys(folder, f"{left.pop(0)}-0"))
    gep.main(args)


if __name__ == "__main__":
    program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    if program == "loop":
        loop(folder)
    else:
        gep(folder, METHODS if program == "gep" else (program,))
