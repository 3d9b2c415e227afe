"""flashgla's models in lm-evaluation-harness (EleutherAI's `lm_eval`, 0.4.9 and later).

    python -m flashgla.lm_eval --model flashgla --model_args pretrained=FOLDER,device=cpu --tasks lambada_openai

The harness (0.4.13) has no entry points for models: in a program of one's own `import flashgla.lm_eval` makes
`model="flashgla"` known. model_args: pretrained (a folder), device, dtype, threads, checkpoint, max_length,
batch_tokens (in one call of the model; batch_size is not looked at), add_bos_token, reuse_prefixes.

Token rules are those of the harness's own `hf` model in 0.4.13: texts begin with bos where the tokenizer adds it
(add_bos_token=True or False overrules it) and unless they spell it; an empty context is bos (eos without one);
loglikelihood_rolling goes by windows of max_length (max_position_embeddings of the config) with one token of context.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from .models import LanguageModel

# Requests handed over at once: enough to pack, few enough for a bar that moves.
REQUESTS_AT_ONCE = 512


def _truth(value: Any) -> bool | None:
    """Of a value of --model_args."""
    if value is None or isinstance(value, bool):
        return value
    return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]


@register_model("flashgla")
class FlashGLA(TemplateLM):
    """A model of flashgla, in this process."""

    backend = "causal"

    def __init__(self, pretrained: str, device: str = "cpu", dtype: str | None = None, threads: int = 0,
                 checkpoint: str = "latest", max_length: int | None = None, batch_tokens: int = 8192,
                 add_bos_token: bool | str | None = None, reuse_prefixes: bool | str = True, max_gen_toks: int = 256,
                 batch_size: Any = None, max_batch_size: Any = None, **unknown: Any):
        super().__init__()
        if unknown:
            raise ValueError(f"flashgla: model_args has {', '.join(unknown)}, which is not known")
        self.model = LanguageModel.load(pretrained, "cuda:0" if device == "cuda" else device, dtype,
                                        threads=int(threads), checkpoint=checkpoint)
        tokenizer = self.model.tokenizer
        self.max_length = int(max_length) if max_length else self.model.max_length
        self.max_gen_toks = int(max_gen_toks)
        self.batch_tokens = int(batch_tokens)
        self.reuse_prefixes = _truth(reuse_prefixes)
        self.add_bos_token = _truth(add_bos_token)
        self.prefix = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if self.prefix is None:
            raise ValueError(f"flashgla: the tokenizer in {pretrained} has neither a begin- nor an end-of-text token")
        #: Tokens that the model read.
        self.tokens_read = 0

    @property
    def eot_token_id(self) -> int:
        return self.model.tokenizer.eos_id if self.model.tokenizer.eos_id is not None else self.prefix

    @property
    def prefix_token_id(self) -> int:
        return self.prefix

    @property
    def tokenizer_name(self) -> str:
        return self.model.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        tokenizer = self.model.tokenizer
        ids = tokenizer.encode(string)
        adds = add_special_tokens if add_special_tokens is not None else self.add_bos_token
        if adds is None or adds:
            # A tokenizer adds what its template says; bos that is asked for by name is added in any case.
            before = tokenizer.adds_bos or (self.add_bos_token is True and add_special_tokens is None)
            spelt = bool(ids) and ids[0] == tokenizer.bos_id
            if before and tokenizer.bos_id is not None and not spelt:
                ids = [tokenizer.bos_id, *ids]
            if tokenizer.adds_eos:
                ids = [*ids, tokenizer.eos_id]
        return ids

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        pairs = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ValueError(f"flashgla: a continuation has {len(continuation)} tokens; "
                                 f"max_length is {self.max_length}")
            room = self.max_length + 1 - len(continuation)
            pairs.append((list(context)[-room:] if room > 0 else [], list(continuation)))
        results: list[tuple[float, bool]] = []
        # Requests of one context stay together.
        order = sorted(range(len(pairs)), key=lambda i: (-len(pairs[i][0]), pairs[i][0]))
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(pairs), disable=disable_tqdm, desc="loglikelihood") as bar:
            begin = 0
            while begin < len(order):
                end = min(begin + REQUESTS_AT_ONCE, len(order))
                while end < len(order) and pairs[order[end]][0] == pairs[order[end - 1]][0]:
                    end += 1
                scores = self.model.loglikelihood([pairs[i] for i in order[begin:end]], batch_tokens=self.batch_tokens,
                                                  reuse_prefixes=bool(self.reuse_prefixes))
                self.tokens_read += self.model.tokens_read
                found.update(zip(order[begin:end], scores))
                bar.update(end - begin)
                begin = end
        for i, (key, _, _) in enumerate(requests):
            results.append((found[i][0], found[i][1]))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, results[-1])
        return results

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        windows, owners = [], []
        for number, request in enumerate(requests):
            (text,) = request.args
            for context, continuation in map(utils.make_disjoint_window, utils.get_rolling_token_windows(
                    token_list=self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length,
                    context_len=1)):
                windows.append((None, context, continuation))
                owners.append(number)
        sums: dict[int, float] = defaultdict(float)
        for number, (log_likelihood, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm)):
            sums[number] += log_likelihood
        for number, request in enumerate(requests):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, sums[number])
        return [sums[number] for number in range(len(requests))]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        texts = []
        for request in tqdm(requests, disable=disable_tqdm, desc="generate_until"):
            context, options = request.args
            options = dict(options)
            until = options.pop("until", [])
            until = [until] if isinstance(until, str) else list(until or [])
            most = int(options.pop("max_gen_toks", options.pop("max_tokens", self.max_gen_toks)))
            sampled = bool(options.pop("do_sample", False))
            temperature = float(options.pop("temperature", 1.0 if sampled else 0.0))
            settings = {name: options.pop(name) for name in ("top_k", "top_p", "min_p", "repetition_penalty", "seed")
                        if name in options}
            if options:
                raise ValueError(f"flashgla: generation_kwargs has {', '.join(options)}, which is not known")
            ids = self.tok_encode(context) or [self.prefix_token_id]
            ids = ids[-max(self.max_length - most, 1):]
            result = self.model.generate(ids, max_tokens=most, temperature=temperature if sampled else 0.0,
                                         stop=[text for text in until if text], **settings)
            texts.append(result.text)
            self.cache_hook.add_partial("generate_until", request.args, result.text)
        return texts


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
