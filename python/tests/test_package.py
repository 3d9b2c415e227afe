"""What the package carries and loads: the program, and libraries only when models or tokenizers are asked for."""

import subprocess
import sys

import pytest

LIBRARIES_OF_MODELS = ("dnnl", "OpenCL", "sentencepiece", "pcre2", "utf8proc", "xxhash", "libfmt", "_models")


def loaded(code: str) -> list[str]:
    """Which of the models' libraries a Python has mapped after this code."""
    script = code + "\nprint(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    return [name for name in LIBRARIES_OF_MODELS if name in maps]


def test_import_loads_none_of_the_libraries_behind_models():
    assert loaded("import flashgla") == []


def test_operators_load_none_of_them():
    assert loaded("""
import numpy as np
import flashgla
x = np.ones((1, 70, 2, 16), np.float32)
o, state = flashgla.gated_linear_attention(x, x, x, -x, output_final_state=True)
flashgla.gated_linear_attention_backward(o, x, x, x, -x)
flashgla.step(x[:, 0], x[:, 0], x[:, 0], state, -x[:, 0])
""") == []


def test_models_load_them():
    names = loaded("import flashgla\nflashgla.LanguageModel")
    assert "_models" in names and "dnnl" in names


@pytest.mark.parametrize("arguments, works", [(["--version"], True), (["evaluate"], False), (["no-such-verb"], False)])
def test_the_program(arguments, works):
    run = subprocess.run([sys.executable, "-m", "flashgla", *arguments], capture_output=True, text=True, check=False)
    assert (run.returncode == 0) == works
    assert "flashgla" in run.stdout + run.stderr


def test_the_version_is_the_programs():
    code = "import flashgla; print('flashgla', flashgla.__version__)"
    ours = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    said = subprocess.run([sys.executable, "-m", "flashgla", "--version"], check=True, capture_output=True, text=True)
    assert said.stdout.split()[:2] == ours.split()  # behind them the commit


def test_arguments_keep_their_names_beside_models():
    code = """
import numpy as np
import flashgla
flashgla.LanguageModel  # loads the other extension
x = np.ones((1, 4, 2, 16), np.float32)
try:
    flashgla.gated_linear_attention(x, x, x, initial_state=np.zeros((1, 2, 16, 8), np.float32))
except ValueError as problem:
    print(problem)
"""
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.startswith("gated_linear_attention: initial_state has shape [1,2,16,8]; expected [1,2,16,16]")
