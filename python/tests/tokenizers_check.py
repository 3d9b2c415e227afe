"""Compares flashgla's tokenizers with the `tokenizers` package on drawn strings, for a tokenizer of each style, trained
here: python tokenizers_check.py [--strings 1000000] [--seed 1] [--styles gpt2,llama3]. Not a part of the tests, which
try a few strings of each (test_tokenizers.py). Needs tokenizers, and for one style sentencepiece and protobuf."""

import argparse
import pathlib
import sys
import tempfile
import time

import tokenizer_styles

from flashgla import _models


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strings", type=int, default=1_000_000, help="in all, shared out among the styles")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--styles", default=",".join(tokenizer_styles.STYLES))
    arguments = parser.parse_args()
    styles = arguments.styles.split(",")
    text = tokenizer_styles.corpus()
    count = -(-arguments.strings // len(styles))
    failed = 0
    for number, style in enumerate(styles):
        theirs = tokenizer_styles.STYLES[style](text)
        if theirs is None:
            print(f"{style}: passed over, for want of sentencepiece")
            continue
        with tempfile.TemporaryDirectory() as folder:
            theirs.save(str(pathlib.Path(folder) / "tokenizer.json"))
            ours = _models.Tokenizer.load(folder)
        specials = [token.content for token in theirs.get_added_tokens_decoder().values()]
        draw = tokenizer_styles.Strings(arguments.seed * 1000 + number, specials)
        start = time.time()
        found, done = [], 0
        while done < count and not found:
            strings = [draw.draw() for _ in range(min(2000, count - done))]
            found = tokenizer_styles.differences(theirs, ours, strings)
            done += len(strings)
        failed += bool(found)
        print(f"{style}: {ours.vocab_size} tokens, {done} strings in {time.time() - start:.0f} s: "
              f"{'different' if found else 'equal'}", flush=True)
        for line in found:
            print("  " + line[:600])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
