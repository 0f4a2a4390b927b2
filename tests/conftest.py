import tempfile

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=25, database=None
)
hypothesis.settings.load_profile("ci")

# Many cases are the same program under another name: each process compiles it once.
_COMPILED = tempfile.TemporaryDirectory(prefix="jdp-compiled-", ignore_cleanup_errors=True)
jax.config.update("jax_compilation_cache_dir", _COMPILED.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# The trusted core bears strictness. What wraps it (optax, flax, the experiments) does not, and
# misuse must be caught under the settings that users have.
LENIENT = ("test_datasets", "test_models", "test_experiments", "test_misuse", "test_interop")
LENIENT += ("test_hypernet", "test_unet")
LENIENT += ("test_aggregate", "test_speed", "test_relu_estimator", "test_relu_study", "test_adam")
LENIENT += ("test_linear_probe", "test_resume", "test_bookkeeping_odd", "test_bad_input")
LENIENT += ("test_bad_commands", "test_study_resume", "test_large")


@pytest.fixture(autouse=True)
def strict_promotion(request):
    if request.module.__name__.split(".")[-1].startswith(LENIENT):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


# Here compiling takes longer than running. XLA's optimisations are on for the clippers, for
# book-keeping on fixed models, and for one door and the recipe in test_devices.py.
UNOPTIMIZED = ("test_adaptive", "test_aggregate", "test_embedding", "test_gradients")
UNOPTIMIZED += ("test_interop", "test_misuse", "test_speed", "test_subspace", "test_twins")
UNOPTIMIZED += ("test_relu_regression", "test_relu_estimator", "test_thresholds")
UNOPTIMIZED += ("test_relu_study", "test_one_visit", "test_bookkeeping_scans")
UNOPTIMIZED += ("test_public_data", "test_linear_probe")
UNOPTIMIZED += ("test_pate", "test_experiments_pate", "test_hypernet", "test_unet")
UNOPTIMIZED_TESTS = ("test_door", "test_random_models", "test_many_random_models")
UNOPTIMIZED_TESTS += ("test_methods_differ", "test_projected_updates", "test_the_average")
UNOPTIMIZED_TESTS += ("test_augmentations", "test_further_methods")
UNOPTIMIZED += ("test_resume", "test_bookkeeping_odd", "test_bad_input", "test_study_resume")


@pytest.fixture(autouse=True)
def quick_compilation(request):
    module = request.module.__name__.split(".")[-1]
    quick = module.startswith(UNOPTIMIZED) or request.node.name.startswith(UNOPTIMIZED_TESTS)
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# Threefry takes longest to compile. Where noise is not what is tested, keys are of another kind.
QUICK_KEYS = ("test_bookkeeping", "test_models", "test_interop", "test_lora", "test_unet")
QUICK_KEYS += ("test_speed", "test_linear_probe", "test_hypernet_lora")


@pytest.fixture(autouse=True)
def quick_keys(request):
    quick = request.module.__name__.split(".")[-1].startswith(QUICK_KEYS)
    jax.config.update("jax_default_prng_impl", "rbg" if quick else "threefry2x32")
    yield
    jax.config.update("jax_default_prng_impl", "threefry2x32")


@pytest.fixture
def key():
    return jax.random.key(20210212)
