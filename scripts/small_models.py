#!/usr/bin/env python3
"""Trains the models of quickstart.sh and of configs/char-level.json on the CPU, over several seeds, and saves how good
they became; scripts/figures.py takes the file for the documents. What the folder of runs has is not trained again.

  scripts/small_models.py OUT.json --text TEXT.txt [--program build/bin/flashgla] [--seeds 1,2,3] [--jobs 1]
                          [--threads N,M] [--work FOLDER] [--commit NAME]

TEXT.txt: some 1 MB of text for char-level, of which its last tenth is the validation part. --jobs: runs side by side;
--threads: CPU threads of a quickstart run and of a char-level run (default: all). Losses do not depend on either."""

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def commit():
    found = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"],
                           capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def machine():
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def last_evaluation(run, recipe):
    """The row of a run that came to its end; None before that."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    found = [row for row in rows if row["kind"] == "eval"]
    settings = json.loads((ROOT / "configs" / f"{recipe}.json").read_text(encoding="utf-8"))
    step = settings["batch_tokens"]  # the last one may be left out
    wanted = int(float(str(settings["train_tokens"]).replace("M", "e6")))
    return found[-1] if found and found[-1]["tokens"] > wanted - step else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--program", default=str(ROOT / "build/bin/flashgla"))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", default=f"{os.cpu_count()},{os.cpu_count()}")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("runs/small_models"))
    parser.add_argument("--commit", default=commit())
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)

    def flashgla(threads, *arguments):
        log = options.work / "log"
        with log.open("ab") as file:
            subprocess.run([options.program, *map(str, arguments), "--quiet"], check=True, stdout=file, stderr=file,
                           env={**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"})

    # As quickstart.sh makes them.
    stories = options.work / "stories.jsonl"
    tokens = options.work / "tokens"
    flashgla("1", "data", "stories", "--seed", 1, "--megabytes", 8, "--out", stories)
    flashgla("1", "data", "prepare", stories, "--out", tokens, "--tokenizer", "byte")
    entropy = json.loads(stories.with_suffix(".json").read_text(encoding="utf-8"))

    quickstart_threads, char_level_threads = options.threads.split(",")
    recipes = {"char-level": (options.text, char_level_threads), "quickstart": (tokens, quickstart_threads)}

    def train(recipe, seed):
        data, threads = recipes[recipe]
        out = options.work / f"{recipe}-{seed}"
        if last_evaluation(out, recipe) is None:
            flashgla(threads, "train", "--config", ROOT / "configs" / f"{recipe}.json", "--data", data, "--out", out,
                     "--seed", seed, "--device", "cpu", "--resume")
        last = last_evaluation(out, recipe)
        return {"recipe": recipe, "seed": seed, "tokens": last["tokens"], "loss": last["loss"], "bpb": last["bpb"]}

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(train, recipe, int(seed)) for recipe in recipes for seed in options.seeds.split(",")]
        runs = [future.result() for future in futures]
    saved = {"commit": options.commit, "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
             "machine": machine(), "text": options.text.name, "stories": entropy, "runs": runs}
    options.out.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    for run in runs:
        print(f"{run['recipe']} seed {run['seed']}: {run['loss']:.4f} nats a token, {run['bpb']:.4f} bits/byte")
    return 0


sys.exit(main())
