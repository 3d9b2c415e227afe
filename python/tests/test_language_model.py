"""flashgla.LanguageModel on a small model that `flashgla train` makes (FLASHGLA_PROGRAM names the program), on the CPU
or on FLASHGLA_TEST_DEVICE."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import flashgla

PROGRAM = os.environ.get("FLASHGLA_PROGRAM", "")
DEVICE = os.environ.get("FLASHGLA_TEST_DEVICE", "cpu")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="FLASHGLA_PROGRAM names no program")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    work = tmp_path_factory.mktemp("model")
    run = lambda *arguments: subprocess.run([PROGRAM, *arguments], cwd=work, check=True, capture_output=True)  # noqa: E731
    run("data", "stories", "--seed", "7", "--megabytes", "0.1", "--out", "stories.jsonl", "--quiet")
    run("data", "prepare", "stories.jsonl", "--out", "tokens", "--quiet")
    run("train", "--data", "tokens", "--preset", "gla-tiny", "--batch", "2", "--length", "64", "--steps", "20",
        "--device", "cpu", "--out", "run")
    return work / "run"


@pytest.fixture(scope="module")
def model(folder):
    return flashgla.LanguageModel.load(folder, device=DEVICE)


def test_operators_load_no_models():
    code = "import sys, flashgla; flashgla.step; assert 'flashgla._models' not in sys.modules; flashgla.LanguageModel"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_said_of_it(model):
    assert model.config["model_type"] == "gla"
    assert model.vocab_size == model.tokenizer.vocab_size == 258
    assert (model.device.partition(":")[0], model.dtype) == (DEVICE.partition(":")[0], "f32")
    assert model.tokenizer.decode(model.tokenizer.encode("lamp é")) == "lamp é"


def test_loglikelihood_is_the_sum_of_logits(model):
    pairs = [("Once there was", " a fox"), ("Once there was", " a lamp"), ("It", "x"), ("", "Long ago")]
    scores = model.loglikelihood(pairs)
    for (context, continuation), score in zip(pairs, scores):
        ids = [256, *(context + continuation).encode()]
        logits = model.logits(ids).astype(np.float64)
        assert logits.shape == (len(ids), 258)
        logs = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) \
            - logits.max(1, keepdims=True)
        places = range(len(ids) - len(continuation) - 1, len(ids) - 1)
        assert math.isclose(score.log_likelihood, sum(logs[i, ids[i + 1]] for i in places), abs_tol=1e-3)
        assert score.is_greedy == all(logits[i].argmax() == ids[i + 1] for i in places)
    shared = model.tokens_read
    again = model.loglikelihood(pairs, reuse_prefixes=False, batch_tokens=1)
    assert shared < model.tokens_read
    assert all(math.isclose(a[0], b[0], abs_tol=1e-3) for a, b in zip(scores, again))


@pytest.mark.parametrize("c", [64, 200])
@pytest.mark.parametrize("choice", [1, 4, 12, 30])
def test_prefixes_of_choices_are_read_once(model, c, choice):
    a = choice - 1  # a choice's last token is predicted, and never read
    pairs = [(list(range(c)), [(7 * i + j) % 256 for j in range(choice)]) for i in range(4)]
    with_reuse = model.loglikelihood(pairs)
    assert model.tokens_read == c + 4 * a
    without = model.loglikelihood(pairs, reuse_prefixes=False)
    assert model.tokens_read == 4 * c + 4 * a
    assert all(math.isclose(one[0], other[0], abs_tol=1e-3) for one, other in zip(with_reuse, without))


def test_rolling(model):
    text = "Once there was a fox. It lived in a wood."
    whole = model.loglikelihood([("", text)])[0].log_likelihood
    assert math.isclose(model.loglikelihood_rolling([text], max_length=1000)[0], whole, abs_tol=1e-3)
    assert model.loglikelihood_rolling([text, ""], max_length=8)[1] == 0.0
    with pytest.raises(ValueError, match="stride is 9"):
        model.loglikelihood_rolling([text], max_length=8, stride=9)


def test_generate(model):
    one = model.generate("Once", max_tokens=30, seed=3)
    assert one == model.generate("Once", max_tokens=30, seed=3)
    assert one.tokens <= 30 and one.finish in ("length", "end")
    assert "".join(model.stream("Once", max_tokens=30, seed=3)) == one.text
    greedy = model.generate_batch(["Once", "Long ago"], max_tokens=12, temperature=0)
    assert [each.text for each in greedy] == [model.generate(p, max_tokens=12, temperature=0).text
                                              for p in ("Once", "Long ago")]
    stop = greedy[0].text[4:6]
    stopped = model.generate("Once", max_tokens=12, temperature=0, stop=stop)
    assert stopped.finish == "stop" and stopped.text == greedy[0].text[:greedy[0].text.index(stop)]
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"min_p": 2}, {"max_tokens": -1}, {"stop": ""}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            model.generate("Once", **wrong)


def test_streams_give_way(model):
    stream = model.stream("Once", max_tokens=1000, stop_at_end=False)
    assert next(stream)
    assert model.generate("Long", max_tokens=3).tokens <= 3  # in between
    assert next(stream)
    stream.close()
    with pytest.raises(StopIteration):
        while True:
            next(stream)


def test_states(model, tmp_path):
    state = model.state("Once there was")
    assert state.tokens == 15
    fork = state.fork()
    state.save(tmp_path / "fox.state")
    first = model.generate(" a", state=state, max_tokens=8, temperature=0)
    assert first.text == model.generate("Once there was a", max_tokens=8, temperature=0).text
    assert fork.tokens == 15
    assert model.generate(" a", state=fork, max_tokens=8, temperature=0) == first
    assert model.generate(" a", state=model.load_state(tmp_path / "fox.state"), max_tokens=8, temperature=0) == first
    with pytest.raises(ValueError, match="absent"):
        model.load_state(tmp_path / "absent")
    with pytest.raises(TypeError, match="state is 3"):
        model.generate("a", state=3)


def test_long_prompts_are_fed_in_pieces(model):
    ids = [i % 256 for i in range(40000)]
    pieces = model.state(ids[:16384])
    pieces.feed(ids[16384:])
    assert model.generate([1], state=pieces, max_tokens=3, temperature=0) == \
        model.generate([1], state=model.state(ids), max_tokens=3, temperature=0)


@pytest.mark.skipif(DEVICE == "cpu", reason="FLASHGLA_TEST_DEVICE names no GPU")
def test_the_device_agrees_with_the_cpu(model, folder):
    cpu = flashgla.LanguageModel.load(folder)
    text = "Once there was a fox. It lived in a wood."
    np.testing.assert_allclose(model.logits(text), cpu.logits(text), rtol=1e-4, atol=1e-4)
    ours, theirs = (each.loglikelihood([("Once", " there was"), ("It", " lived in")]) for each in (model, cpu))
    assert [one.is_greedy for one in ours] == [one.is_greedy for one in theirs]
    assert all(math.isclose(a[0], b[0], rel_tol=1e-4) for a, b in zip(ours, theirs))
    ours, theirs = (each.generate("Once there", max_tokens=40, temperature=0) for each in (model, cpu))
    assert ours == theirs


def test_errors_name_what_is_wrong(model, folder, tmp_path):
    with pytest.raises(ValueError, match="absent"):
        flashgla.LanguageModel.load(tmp_path / "absent")
    with pytest.raises(ValueError, match="f17"):
        flashgla.LanguageModel.load(folder, dtype="f17")
    with pytest.raises(ValueError, match="tpu"):
        flashgla.LanguageModel.load(folder, device="tpu")
    with pytest.raises(ValueError, match="request 1 has no context"):
        model.loglikelihood([([1], [2]), ([], [2])])
    with pytest.raises(ValueError, match="token of request 0 is 999"):
        model.loglikelihood([([1], [999])])
    with pytest.raises(TypeError, match="request 0"):
        model.loglikelihood([("a", [2])])
    with pytest.raises(ValueError, match="seed is 1180591620717411303424; expected less than 2.63"):
        model.generate("Once", seed=2**70)
    with pytest.raises(TypeError, match="requests is 'ab'"):
        model.loglikelihood("ab")
    with pytest.raises(TypeError, match="texts is 'ab'"):
        model.loglikelihood_rolling("ab")
    with pytest.raises(TypeError, match="text is 3"):
        model.logits(3)
    with pytest.raises(TypeError, match="temperature is 'hot'"):
        model.generate("a", temperature="hot")
    with pytest.raises(TypeError, match="stop has 3"):
        model.generate("a", stop=[3])
    with pytest.raises(ValueError, match="prompt has a lone surrogate"):
        model.generate("\ud800")
    with pytest.raises(ValueError, match="threads is -1"):
        flashgla.LanguageModel.load(folder, threads=-1)
    with pytest.raises(ValueError, match="no tokens"):
        model.logits([])


def test_the_gil_is_released(model):
    ticks = []
    done = threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.monotonic()
    while time.monotonic() - start < 0.3:
        model.loglikelihood([(list(range(200)), [1] * 100)] * 8)
    done.set()
    thread.join()
    assert len(ticks) > 20


def test_ctrl_c_ends_a_long_call(folder):
    code = f"""
import flashgla, sys
model = flashgla.LanguageModel.load({str(folder)!r}, device={DEVICE!r})
print("ready", flush=True)
try:
    model.loglikelihood([(list(range(250)), [i % 250]) for i in range(200000)], reuse_prefixes=False, batch_tokens=256)
except KeyboardInterrupt:
    print("interrupted")
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "interrupted\n"


def test_config_is_json(model):
    assert json.dumps(model.config)
