import json
import subprocess
import sys

import pytest

from jdp import _cli

MNIST = "--noise-multiplier 1.1 --sampling-rate 0.00426666666 --steps 14062 --delta 1e-5"


def run(capsys, command):
    status = _cli.main(command.split())
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize(("accountant", "published"), [("pld", 2.382), ("rdp", 2.597)])
def test_epsilon(capsys, accountant, published):
    status, out, _ = run(capsys, f"epsilon {MNIST} --accountant {accountant} --json")
    found = json.loads(out)
    assert status == 0
    assert found["epsilon"] == pytest.approx(published, abs=1e-3)
    assert found["accountant"] == accountant and found["adjacency"] == "zero-out"
    status, out, _ = run(capsys, f"epsilon {MNIST} --accountant {accountant}")
    assert status == 0 and "zero-out" in out
    assert float(out.split()[1]) == pytest.approx(found["epsilon"], rel=1e-5)


def test_calibrate(capsys):
    options = "--sampling-rate 0.02 --steps 2500 --delta 1e-5"
    status, out, _ = run(capsys, f"calibrate --epsilon 2 {options} --json")
    found = json.loads(out)
    assert status == 0
    assert found["noise_multiplier"] == pytest.approx(2.143, rel=1e-3)
    assert 1.98 <= found["epsilon"] <= 2
    z = found["noise_multiplier"]
    _, out, _ = run(capsys, f"epsilon --noise-multiplier {z!r} {options} --json")
    assert json.loads(out)["epsilon"] == found["epsilon"]
    status, out, _ = run(capsys, f"calibrate --epsilon 2 {options}")
    assert status == 0 and out.startswith("noise multiplier 2.14")


def test_no_noise(capsys):
    status, out, _ = run(capsys, "epsilon --noise-multiplier 0 --delta 1e-5 --json")
    assert status == 0 and json.loads(out)["epsilon"] == "inf"


def test_report(capsys, tmp_path):
    (tmp_path / "report.txt").write_text("Privacy statement\n")
    (tmp_path / "summary.json").write_text('{"epsilon": 1.0}\n')
    assert run(capsys, f"report {tmp_path}")[:2] == (0, "Privacy statement\n")
    status, out, _ = run(capsys, f"report {tmp_path} --json")
    assert status == 0 and json.loads(out) == {"epsilon": 1.0}


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("epsilon --noise-multiplier 1 --delta 1.5", "delta"),
        ("epsilon --noise-multiplier -1 --delta 1e-5", "noise_multiplier"),
        ("epsilon --noise-multiplier 1 --delta 1e-5 --sampling-rate 2", "sampling_rate"),
        ("epsilon --noise-multiplier 1 --delta 1e-5 --sampling-rate 1e-320", "sampling_rate"),
        ("epsilon --noise-multiplier 1 --delta 1e-5 --steps -3", "steps"),
        ("calibrate --epsilon 0 --delta 1e-5", "epsilon"),
        ("calibrate --epsilon 1 --delta 1e-5 --steps 0", "steps"),
        ("report /no/such/folder", "report.txt"),
        ("report /no/such/folder --json", "summary.json"),
    ],
)
def test_bad_values_give_one_line_and_status_2(capsys, command, word):
    status, out, err = run(capsys, command)
    assert status == 2 and out == ""
    assert word in err and err.count("\n") == 1 and "Traceback" not in err


def test_report_names_what_is_wrong_with_the_folder(capsys, tmp_path):
    (tmp_path / "results.json").write_text("{}")
    status, out, err = run(capsys, f"report {tmp_path}")
    assert status == 2 and "unfinished" in err and "same command again" in err
    (tmp_path / "report.txt").write_bytes(b"\xff\xfe")
    status, out, err = run(capsys, f"report {tmp_path}")
    assert (status, out) == (2, "") and "report.txt is not UTF-8" in err and err.count("\n") == 1


def test_arithmetic_errors_give_one_line_and_status_2(capsys, monkeypatch):
    def overflow(*args, **kwargs):
        raise OverflowError("math range error")

    monkeypatch.setattr(_cli.accounting, "privacy_spent", overflow)
    status, out, err = run(capsys, f"epsilon {MNIST}")
    assert (status, out) == (2, "") and err.count("\n") == 1


@pytest.mark.parametrize(
    "command", ["", "epsilon", "epsilon --noise-multiplier x --delta 1e-5", "nonsense",
                "epsilon --noise-multiplier 1 --delta 1e-5 --accountant gdp"]
)  # fmt: skip
def test_bad_usage_gives_status_2(capsys, command):
    with pytest.raises(SystemExit) as error:
        _cli.main(command.split())
    assert error.value.code == 2
    assert "usage: jdp" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["--help", "epsilon --help", "calibrate --help"])
def test_help_teaches(capsys, command):
    with pytest.raises(SystemExit) as error:
        _cli.main(command.split())
    assert error.value.code == 0
    assert "jdp calibrate --epsilon 2 --sampling-rate 0.02" in capsys.readouterr().out


def test_the_command_runs_as_a_process():
    command = [sys.executable, "-m", "jdp._cli", "epsilon", *MNIST.split(), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["epsilon"] == pytest.approx(2.382, abs=1e-3)


@pytest.mark.parametrize("text", ["no JSON", "[1]", "[" * 100_000, '"text"'], ids=len)
def test_a_summary_that_no_run_wrote_is_refused(text, capsys, tmp_path):
    (tmp_path / "summary.json").write_text(text)
    status, out, err = run(capsys, f"report {tmp_path} --json")
    assert (status, out) == (2, "") and "summary.json is not a JSON object" in err


@pytest.mark.parametrize("command", ["epsilon --noise-multiplier 1 --delta 1e-5", "--help"])
def test_output_that_nobody_takes(command):
    shell = f"{sys.executable} -m jdp._cli {command}"
    for place, status, message in (("| true", 0, ""), (">/dev/full", 2, "cannot print the result")):
        line = f"set -o pipefail; {shell} {place}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        assert done.returncode == status and message in done.stderr
        assert len(done.stderr.splitlines()) == (1 if message else 0)
