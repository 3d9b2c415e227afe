"""flashgla train, killed by SIGKILL at 30 moments and resumed each time: kill_test.py PROGRAM

A third of the kills come at a random time after the start, a third after a random number of steps, a third while a
checkpoint is being written. A run that came to its end by such steps has, bit for bit, the files of one that was never
interrupted, one row of metrics for each step, and nothing half written beside them."""

import hashlib
import pathlib
import random
import subprocess
import sys
import tempfile
import time

KILLS = 30
STEPS = 120
MODEL = ('{"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "intermediate_size": 32, "gate_low_rank_dim": 4, '
         '"tie_word_embeddings": true}')
PATIENCE = 120.0  # seconds for anything that takes a fraction of one


def start(program, folder, data, config, log):
    return subprocess.Popen([program, "train", "--config", config, "--data", data, "--out", folder, "--resume"],
                            stdout=log, stderr=log)


def rows(run):
    """Whole rows of metrics so far."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_until(process, reached):
    """True when it was reached before the program ended."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None:
        if reached():
            return True
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"not reached in {PATIENCE} s")
        time.sleep(0.0005)
    return False


def kill(process, run, kind, rng):
    """Kills the program at a moment of this kind. False when it had ended before."""
    if kind == "time":
        moment = time.monotonic() + rng.uniform(0.0, 0.3)
        killed = wait_until(process, lambda: time.monotonic() > moment)
    elif kind == "step":
        wanted = rows(run) + rng.randint(1, 12)
        killed = wait_until(process, lambda: rows(run) >= wanted)
    else:
        checkpoints = run / "checkpoints"
        killed = wait_until(process, lambda: any(checkpoints.glob("*.partial")) if checkpoints.exists() else False)
        time.sleep(rng.choice([0.0, 0.0, 0.001, 0.003]))
    process.kill()
    process.wait()
    return killed


def content(run):
    """Hashes of everything that the newest checkpoint holds but trainer.json, which says how long the run took."""
    newest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in newest.iterdir()
            if path.name != "trainer.json"}


def check_finished(run, expected):
    assert content(run) == expected, f"{run.name}: other files than the uninterrupted run's"
    left = [path.name for path in run.rglob("*") if "partial" in path.name or path.name.endswith(".tmp")]
    assert not left, f"{run.name}: left behind: {left}"
    assert rows(run) == STEPS, f"{run.name}: {rows(run)} rows of metrics; expected {STEPS}"
    print(f"{run.name}: the same bits")


def main():
    program = str(pathlib.Path(sys.argv[1]).resolve())
    rng = random.Random(7)
    with tempfile.TemporaryDirectory(prefix="flashgla_kill_") as name:
        work = pathlib.Path(name)
        text = work / "text.txt"
        text.write_text(" ".join(rng.choice(["the", "cat", "sat", "on", "a", "mat.\n"]) for _ in range(3000)))
        data, config, log = work / "data", work / "train.json", work / "log"
        subprocess.run([program, "data", "prepare", text, "--out", data, "--quiet", "--validation", "0"], check=True,
                       stdout=subprocess.DEVNULL)
        config.write_text(f'{{"model": {MODEL}, "train_tokens": {STEPS * 128}, "batch_tokens": 128, '
                          '"sequence_length": 32, "checkpoint_every": 3, "threads": 1}')
        with log.open("wb") as said:
            assert start(program, work / "whole", data, config, said).wait() == 0, "the uninterrupted run failed"
            expected = content(work / "whole")
            kills, runs = 0, 0
            while kills < KILLS:
                runs += 1
                run = work / f"run_{runs}"
                while kills < KILLS and kill(start(program, run, data, config, said), run,
                                             ("time", "step", "save")[kills % 3], rng):
                    kills += 1
                assert start(program, run, data, config, said).wait() == 0, f"{run.name}: resuming failed"
                check_finished(run, expected)
        # A kill may cost the last steps, never a checkpoint.
        assert b"passed over" not in log.read_bytes(), log.read_text()
        print(f"{kills} kills in {runs} runs")


main()
