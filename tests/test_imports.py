"""The import table: arrows go down only, so that the trusted core can be read by itself."""

import ast
import pathlib
import subprocess
import sys

import pytest

import jdp

BASE = {"_typing", "_check", "_tree"}
CORE = {"clipping", "noise"}
TABLE = {
    "_typing": set(),
    "_check": set(),
    "_tree": {"_typing", "_check"},
    "_normal": {"_typing"},
    "_system": {"_typing", "_check"},
    "clipping": BASE,
    "noise": BASE | {"_normal", "_system", "clipping"},
    "gradients": BASE | {"_uses", "clipping", "bookkeeping"},
    "aggregate": BASE | CORE,
    "adaptive": BASE | CORE | {"aggregate"},
    "groups": {"_typing", "_check"},
    "subspace": BASE | {"groups"},
    "_uses": set(),
    "_walk": {"_uses"},
    "_factors": {"_tree", "_uses"},
    "bookkeeping": BASE | {"_factors", "_uses", "_walk", "clipping"},
    "anchors": BASE | {"gradients"},
    "moving_subspace": BASE | {"noise", "aggregate", "anchors", "subspace"},
    "embedding": BASE | CORE | {"aggregate", "anchors", "gradients", "moving_subspace", "subspace"},
    # Public data: clippers that act before the clip, transformations that act after the noise.
    "preconditioning": BASE | {"clipping"},
    "projection": BASE | {"aggregate", "anchors", "moving_subspace", "subspace"},
    "mirror_descent": BASE | {"noise", "aggregate", "gradients"},
    "public_data": {"mirror_descent", "preconditioning", "projection"},
    "adam": BASE | {"aggregate"},
    "lora": BASE,
    # The host rooms know nothing of gradients.
    "_accountants": {"_typing", "_check"},
    "accounting": {"_typing", "_check", "_accountants"},
    "sampling": {"_typing", "_check"},
    "planning": {"_typing", "_check", "accounting", "sampling"},
    "_journal": set(),
    "ledger": {"_typing", "_check", "_journal", "accounting", "planning"},
    "_queries": {"_typing", "_check", "planning"},
    "_store": {"_typing", "_check", "_system"},
    "checkpoints": {"_typing", "_check", "_queries", "_store", "ledger", "planning"},
    "shuffling": {"_typing", "_check", "_accountants"},
    "one_visit": {"_typing", "_check", "accounting", "planning", "sampling", "shuffling"},
    # The auditor does not trust the accountant, nor anything else that it audits.
    "_confidence": {"_check"},
    "one_run": {"_check", "_confidence"},
    "auditing": {"_check", "_confidence", "one_run"},
    # PATE: what a vote costs, and the vote.
    "vote_plan": {"_typing", "_check", "accounting", "one_visit", "planning"},
    "pate": BASE | CORE | {"vote_plan"},
    # DP-DeepSets: a release that knows nothing of networks, and networks about it.
    "set_embedding": BASE | CORE | {"_uses", "one_visit", "planning"},
    "hypernet_networks": {"_check"},
    "hypernet_model": BASE | {"set_embedding"},
    "hypernet_training": BASE | {"hypernet_model"},
    "hypernet": {"hypernet_model", "hypernet_networks", "hypernet_training", "set_embedding"},
    # ReLU regression: programs, and the doors above them.
    "thresholds": BASE | CORE,
    "glmtron": BASE | {"clipping"},
    "tree_aggregation": BASE | CORE,
    "relu_fit": BASE
    | {"noise", "glmtron", "one_visit", "planning", "sampling", "thresholds", "tree_aggregation"},
    "relu_estimator": BASE
    | {"relu_fit", "glmtron", "noise", "one_visit", "planning", "thresholds"},
    "relu_regression": {
        "glmtron",
        "one_visit",
        "relu_estimator",
        "relu_fit",
        "shuffling",
        "thresholds",
    },
    "_cli": {"_typing", "_check", "accounting", "planning", "sampling"},
}
PACKAGE = pathlib.Path(jdp.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")
# What users of the core need not have.
NETWORKS = {"hypernet_networks", "hypernet_model"}  # where Flax is
FORBIDDEN = {"flax", "tensorflow", "tensorflow_datasets", "experiments", "matplotlib", "tyro"}


def _imports(module):
    inside, outside = set(), set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [node.module]
            if node.module == "jdp":
                names = [f"jdp.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "jdp":
                assert rest, f"{module} imports the whole package"
                inside.add(rest[0])
            else:
                outside.add(first)
    return inside, outside


def test_table_is_complete():
    assert sorted(TABLE) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_arrows_go_down_only(module):
    inside, outside = _imports(module)
    assert inside <= TABLE[module], f"not in the table: {inside - TABLE[module]}"
    assert not outside & (FORBIDDEN - ({"flax"} if module in NETWORKS else set()))


def test_importing_the_package_does_not_import_flax():
    command = "import sys, jdp; assert 'flax' not in sys.modules"
    subprocess.run([sys.executable, "-c", command], check=True)


def test_no_public_name_is_a_module():
    public = {name for name in vars(jdp) if not name.startswith("_")}
    functions = {name for name in public if callable(getattr(jdp, name))}
    assert not functions & set(MODULES)


def test_assertions_protect_nothing():
    """An interpreter with -O has none of them: they only tell the type checker what is known."""
    experiments = PACKAGE.parent / "experiments"
    for path in [*PACKAGE.glob("*.py"), *experiments.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                text = ast.unparse(node.test)
                assert text.endswith(" is not None") or text.startswith("isinstance("), path
