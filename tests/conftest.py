import hypothesis
import jax
import pytest

hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=25, database=None
)
hypothesis.settings.load_profile("ci")

# The host rooms and the experiments follow NumPy's promotion; the trusted core bears strictness.
LENIENT = ("test_datasets", "test_models", "test_experiments")


@pytest.fixture(autouse=True)
def strict_promotion(request):
    if request.module.__name__.split(".")[-1].startswith(LENIENT):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def key():
    return jax.random.key(20210212)
