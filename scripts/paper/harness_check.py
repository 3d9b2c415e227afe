"""Compares flashgla's models with another implementation inside lm-evaluation-harness, over every type of request.

    python scripts/paper/harness_check.py MODEL [--against hf|logits] [--device cpu] [--examples 40]

MODEL: a folder with weights and a tokenizer that both sides read: for `hf` (needs torch and transformers, no network)
a checkpoint that transformers knows, in f32 on the CPU; `logits` is a model of one request at a time on
LanguageModel.logits, to try the packing, the shared contexts and the token rules without PyTorch. The tasks are made
here, over small JSONL files; a third of the continuations are what the model itself writes, so that greedy ones and
exact matches occur. One task is run by the command line, too. Ends with exit code 1 when a score (an accuracy, a match)
differs at all, a perplexity by more than 1e-4 of it, or a log-likelihood by more than 1e-4 of it or 1e-4 nats a token.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import flashgla.lm_eval
import lm_eval
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from flashgla import LanguageModel

WORDS = "the river was cold and a lamp had been lit under the bridge where roads meet; she carried bread home".split()

TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {type}
{fields}
"""
TASKS = {
    "loglikelihood": ("loglikelihood", "doc_to_text: '{{context}}'\ndoc_to_target: '{{continuation}}'\n"
                      "target_delimiter: ''\nmetric_list: [{metric: perplexity}, {metric: acc}]"),
    "choices": ("multiple_choice", "doc_to_text: '{{context}}'\ndoc_to_choice: '{{choices}}'\n"
                "doc_to_target: '{{answer}}'\nmetric_list: [{metric: acc}, {metric: acc_norm}]"),
    "rolling": ("loglikelihood_rolling", "doc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list: "
                "[{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]"),
    "until": ("generate_until", "doc_to_text: '{{context}}'\ndoc_to_target: '{{continuation}}'\ngeneration_kwargs: "
              "{until: ['.', \"\\n\\n\"], max_gen_toks: 24, do_sample: false}\nmetric_list: [{metric: exact_match}]"),
}


class OneByOne(TemplateLM):
    """Requests one at a time, by logits of the whole text."""

    def __init__(self, folder: str, device: str):
        super().__init__()
        self.like = flashgla.lm_eval.FlashGLA(folder, device=device)
        self.model: LanguageModel = self.like.model

    eot_token_id = property(lambda self: self.like.eot_token_id)
    prefix_token_id = property(lambda self: self.like.prefix_token_id)
    max_length = property(lambda self: self.like.max_length)

    def tok_encode(self, string, add_special_tokens=None, **_):
        return self.like.tok_encode(string, add_special_tokens)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        results = []
        for _, context, continuation in requests:
            ids = (list(context) + list(continuation))[-(self.like.max_length + 1):]
            logits = self.model.logits(ids[:-1]).astype(np.float64)[-len(continuation):]
            top = logits.max(-1, keepdims=True)
            logs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
            results.append((float(sum(logs[i, t] for i, t in enumerate(continuation))),
                            bool((logits.argmax(-1) == np.array(continuation)).all())))
        return results

    loglikelihood_rolling = flashgla.lm_eval.FlashGLA.loglikelihood_rolling

    def generate_until(self, requests, disable_tqdm=False):
        texts = []
        for request in requests:
            context, options = request.args
            ids, most = self.tok_encode(context) or [self.prefix_token_id], options["max_gen_toks"]
            ids = ids[-max(self.like.max_length - most, 1):]
            written: list[int] = []
            for _ in range(most):
                token = int(self.model.logits(ids + written)[-1].argmax())
                if token == self.eot_token_id:
                    break
                written.append(token)
            text = self.model.tokenizer.decode(written)
            places = [text.find(stop) for stop in options["until"] if stop in text]
            texts.append(text[:min(places)] if places else text)
        return texts


def make_tasks(folder: pathlib.Path, examples: int, model: LanguageModel) -> None:
    draw = random.Random(3)

    def some(low: int, high: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randrange(low, high)))

    rows = {
        "loglikelihood": [{"context": some(1, 60), "continuation": " " + some(1, 8)} for _ in range(examples)],
        "choices": [{"context": some(1, 60), "choices": [some(1, 8) for _ in range(4)], "answer": draw.randrange(4)}
                    for _ in range(examples)],
        "rolling": [{"text": some(1, 900)} for _ in range(max(examples // 4, 2))],
        "until": [{"context": some(1, 60), "continuation": some(1, 8)} for _ in range(max(examples // 4, 2))],
    }
    rows["loglikelihood"][0]["context"] = ""
    for name in ("loglikelihood", "until"):
        for row in rows[name][1::3]:  # what the model writes there, as far as it is whole characters
            text = model.generate(row["context"], max_tokens=24 if name == "until" else 3, temperature=0.0).text
            row["continuation"] = text.split(".")[0].split("\ufffd")[0] or " a"
    for name, (kind, fields) in TASKS.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        (folder / f"flashgla_{name}.yaml").write_text(TASK.format(name=f"flashgla_{name}", file=file, type=kind,
                                                                  fields=fields))


def evaluate(model, folder: pathlib.Path, **arguments):
    return lm_eval.simple_evaluate(model=model, tasks=[f"flashgla_{name}" for name in TASKS], log_samples=True,
                                   task_manager=TaskManager(include_path=str(folder), include_defaults=False),
                                   bootstrap_iters=0, **arguments)


def pairs_of(sample) -> list[tuple[float, bool, str]]:
    """(log-likelihood, greedy, text) of a sample's requests; of a rolling one there is no flag."""
    found = []
    for response, arguments in zip(sample["resps"], sample["arguments"]):
        one = response[0] if isinstance(response[0], (list, tuple)) else (response[0], False)
        found.append((float(one[0]), str(one[1]) == "True", arguments[-1]))
    return found


def compare_samples(ours, theirs, model) -> int:
    """Prints and counts the requests whose answers differ."""
    failed = requests = greedy = matches = 0
    worst = worst_token = 0.0
    for task, samples in theirs["samples"].items():
        mine = {sample["doc_id"]: sample for sample in ours["samples"][task]}
        for sample in samples:
            other = mine[sample["doc_id"]]
            if task == "flashgla_until":
                matches += sample["exact_match"] == 1
                if sample["resps"] != other["resps"]:
                    failed += 1
                    print(f"{task} {sample['doc_id']}: {other['resps']} {sample['resps']}")
                continue
            for (a, a_greedy, text), (b, b_greedy, _) in zip(pairs_of(other), pairs_of(sample)):
                requests += 1
                greedy += b_greedy
                by_token = abs(a - b) / max(len(model.model.tokenizer.encode(text)), 1)
                worst, worst_token = max(worst, abs(a - b) / max(abs(b), 1.0)), max(worst_token, by_token)
                if abs(a - b) > 1e-4 * max(abs(b), 1.0) or by_token > 1e-4 or a_greedy != b_greedy:
                    failed += 1
                    print(f"{task} {sample['doc_id']}: {a} {a_greedy}, {b} {b_greedy}")
    print(f"{requests} log-likelihoods, {greedy} of them greedy; largest difference {worst:.2e} of it, "
          f"{worst_token:.2e} nats a token; {matches} exact matches; tokens read: {model.tokens_read}")
    return failed


def command_line_fails(model: str, device: str, folder: pathlib.Path, ours) -> int:
    """Runs the four-choice task by `python -m flashgla.lm_eval`; 1 when its accuracies are not those of `ours`."""
    command = [sys.executable, "-m", "flashgla.lm_eval", "--model", "flashgla",
               "--model_args", f"pretrained={model},device={device}", "--tasks", "flashgla_choices",
               "--include_path", str(folder), "--output_path", str(folder / "out.json")]
    ran = subprocess.run(command, capture_output=True, text=True)
    written = sorted(folder.glob("out*.json"))
    if ran.returncode != 0 or not written:
        print(f"the command line failed: {ran.stderr.strip().splitlines()[-1]}")
        return 1
    found = json.loads(written[-1].read_text())["results"]["flashgla_choices"]
    known = ours["results"]["flashgla_choices"]
    equal = all(found[metric] == known[metric] for metric in ("acc,none", "acc_norm,none"))
    print(f"the command line: {'equal' if equal else 'DIFFERENT'}")
    return 0 if equal else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--against", choices=("hf", "logits"), default="hf")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--examples", type=int, default=40)
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        ours_model = flashgla.lm_eval.FlashGLA(arguments.model, device=arguments.device)
        make_tasks(folder, arguments.examples, ours_model.model)
        ours = evaluate(ours_model, folder)
        if arguments.against == "hf":
            theirs = evaluate("hf", folder, device="cpu",
                              model_args=f"pretrained={arguments.model},dtype=float32,max_length={ours_model.max_length}")
        else:
            theirs = evaluate(OneByOne(arguments.model, arguments.device), folder)
        for task, metrics in theirs["results"].items():
            for metric, value in metrics.items():
                if not isinstance(value, float):
                    continue
                mine = ours["results"][task][metric]
                exact = "acc" in metric or "match" in metric
                close = mine == value if exact else abs(mine - value) <= 1e-4 * max(1.0, abs(value))
                failed += not close
                print(f"{task:24} {metric:24} {mine:.6f} {value:.6f}{'' if close else '  DIFFERENT'}")
        failed += compare_samples(ours, theirs, ours_model)
        failed += command_line_fails(arguments.model, arguments.device, folder, ours)
    print("equal" if not failed else f"{failed} differences")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
