"""Language models and tokenizers: what `flashgla.LanguageModel` and `flashgla.Tokenizer` are.

Kept apart from the operators, so that `import flashgla` loads none of the libraries behind them. Nothing here needs
PyTorch. Calls release the GIL, one call at a time uses a model, and Ctrl-C ends a long call. An argument that is not
what it must be is a ValueError that names it.
"""

from __future__ import annotations

import json
import numbers
import operator
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import flashgla._models as _models
from flashgla._models import Tokenizer

from ._cuda import load_cublaslt

if TYPE_CHECKING:
    import numpy

__all__ = ["Generation", "LanguageModel", "LogLikelihood", "State", "Tokenizer"]

#: A text, which the model's tokenizer encodes, or token ids as they are.
Text = str | Sequence[int]


def _whole(name: str, value: Any, least: int = 0) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; expected a whole number") from None
    if number < least:
        raise ValueError(f"{name} is {number}; expected {least} or more")
    if number >= 2**63:
        raise ValueError(f"{name} is {number}; expected less than 2^63")
    return number


def _real(name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; expected a number")
    return float(value)


def _several(name: str, value: Any) -> list[Any]:
    """Of an argument that is a sequence of texts: one text is none, though Python would take its characters."""
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name} is {value!r:.60}; expected a list")
    return list(value)


class LogLikelihood(NamedTuple):
    """Natural log of P(continuation | context), and whether each of its tokens is the most likely one."""

    log_likelihood: float
    is_greedy: bool


class Generation(NamedTuple):
    """What a model wrote: its text, how many tokens, and what ended it: length, stop or end (of the text)."""

    text: str
    tokens: int
    finish: str


class State:
    """A sequence in progress: what it has seen, in memory that does not grow with its length for recurrent models.

    Made by LanguageModel.state; LanguageModel.generate and stream go on from it, and it goes along.
    """

    def __init__(self, model: LanguageModel, state: _models.State):
        self._model = model
        self._state = state

    @property
    def tokens(self) -> int:
        """Tokens seen so far."""
        return self._state.tokens

    def feed(self, text: Text) -> None:
        """Takes a text in."""
        ids = self._model._prompt("text", text, begins=self.tokens == 0)
        if ids:
            self._state.feed(ids)

    def fork(self) -> State:
        """A copy that goes its own way."""
        return State(self._model, self._state.fork())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the state to a file, of a few megabytes for GLA, which LanguageModel.load_state reads."""
        self._state.save(os.fspath(path))


class LanguageModel:
    """A model in a folder (config.json, safetensors, a tokenizer), or of a run of `flashgla train`."""

    def __init__(self, model: _models.Model):
        """Use LanguageModel.load."""
        self._model = model
        #: Tokens that the model read for the last loglikelihood; contexts that requests share count once.
        self.tokens_read = 0

    @classmethod
    def load(cls, folder: str | os.PathLike[str], device: str = "cpu", dtype: str | None = None, *, threads: int = 0,
             checkpoint: str = "latest") -> LanguageModel:
        """Loads a model.

        Args:
            folder: a model folder, or the folder of a run.
            device: cpu, cuda or cuda:N where this build has CUDA, or auto: a GPU where there is one.
            dtype: of the weights in memory: f32 or bf16; None: as stored.
            threads: of the CPU; 0: all.
            checkpoint: of a run: latest, best, or step-00000500 as its folder is called.
        """
        for name, value in (("device", device), ("dtype", dtype or ""), ("checkpoint", checkpoint)):
            if not isinstance(value, str):
                raise TypeError(f"load: {name} is {value!r}; expected a str")
        if not isinstance(folder, (str, os.PathLike)):
            raise TypeError(f"load: folder is {folder!r}; expected a path")
        if device.startswith("cuda") or device == "auto":
            load_cublaslt()
        return cls(_models.Model.load(os.fspath(folder), device, dtype, _whole("load: threads", threads), checkpoint))

    def __repr__(self) -> str:
        return f"<flashgla.LanguageModel of {self._model.folder!r}, {self.dtype} on {self.device}>"

    @property
    def config(self) -> dict[str, Any]:
        """The fields of config.json."""
        return json.loads(self._model.config)

    @property
    def vocab_size(self) -> int:
        """Of the model; the tokenizer may have fewer tokens."""
        return self._model.vocab_size

    @property
    def max_length(self) -> int:
        """max_position_embeddings of the config. Recurrent models read longer texts all the same."""
        return self._model.max_length

    @property
    def device(self) -> str:
        return self._model.device

    @property
    def dtype(self) -> str:
        return self._model.dtype

    @property
    def fingerprint(self) -> str:
        """Hash of config and weights, in hexadecimal."""
        return self._model.fingerprint

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ValueError when the folder has none."""
        if self._model.tokenizer is None:
            raise ValueError(f"{self._model.folder} has no tokenizer")
        return self._model.tokenizer

    def logits(self, text: Text) -> numpy.ndarray:
        """Logits of the next token after every token of a text: float32 [T, vocab_size]."""
        return self._model.logits(self._prompt("text", text))

    def loglikelihood(self, requests: Sequence[tuple[Text, Text]], *, batch_tokens: int = 8192,
                      reuse_prefixes: bool = True, max_length: int | None = None) -> list[LogLikelihood]:
        """log P of continuations of contexts.

        Pairs of texts are encoded as lm-evaluation-harness does it: spaces at the context's end go to the continuation,
        and both are encoded together; an empty context is the begin-of-text token. Pairs of ids are taken as they are.

        Args:
            requests: pairs (context, continuation), both str or both ids.
            batch_tokens: tokens in one call of the model.
            reuse_prefixes: read a context that several requests share once.
            max_length: of contexts of text that are longer (with the continuation) only the end is read; None: all.
        """
        pairs = []
        for number, request in enumerate(_several("loglikelihood: requests", requests)):
            if isinstance(request, str) or len(request) != 2:
                raise TypeError(f"loglikelihood: request {number} is {request!r:.60}; expected (context, continuation)")
            context, continuation = request
            if isinstance(context, str) != isinstance(continuation, str):
                raise TypeError(f"loglikelihood: request {number} is of a str and of ids; expected both alike")
            if isinstance(context, str):
                pairs.append(self._model.encode_pair(context, continuation, max_length or 0))
            else:
                pairs.append((_ids(f"loglikelihood: request {number}", context),
                              _ids(f"loglikelihood: request {number}", continuation)))
        scores, self.tokens_read = self._model.loglikelihood(pairs, batch_tokens, reuse_prefixes)
        return [LogLikelihood(*score) for score in scores]

    def loglikelihood_rolling(self, texts: Sequence[Text], *, max_length: int | None = None, stride: int | None = None,
                              batch_tokens: int = 8192) -> list[float]:
        """log P of whole texts, in windows.

        Args:
            texts: of a str all tokens are predicted, from a begin-of-text token on; of ids all but the first.
            max_length: tokens of a window; None: the model's.
            stride: tokens by which windows advance; None: max_length, with one token of context before each.
        """
        documents = [[self._model.prefix_token(), *self.tokenizer.encode(text)] if isinstance(text, str)
                     else _ids(f"loglikelihood_rolling: text {number}", text)
                     for number, text in enumerate(_several("loglikelihood_rolling: texts", texts))]
        length = max_length or self.max_length
        return self._model.rolling(documents, length, stride or length, batch_tokens)

    def generate(self, prompt: Text = "", *, max_tokens: int = 256, temperature: float = 1.0, top_k: int = 0,
                 top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0, seed: int = 0,
                 stop: str | Sequence[str] = (), stop_at_end: bool = True, state: State | None = None) -> Generation:
        """Lets the model write.

        Args:
            prompt: a text or ids.
            max_tokens: at most.
            temperature: 0: always the most likely token.
            top_k: only the k most likely tokens; 0: all.
            top_p: only the most likely tokens that together reach this probability.
            min_p: only tokens with this share of the most likely one's probability.
            repetition_penalty: above 1: tokens already seen become less likely.
            seed: equal seeds write equal texts.
            stop: texts at which to end; they are not given out.
            stop_at_end: end at the tokenizer's end-of-text token.
            state: go on from there; it is advanced.
        """
        stream = self.stream(prompt, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
                             min_p=min_p, repetition_penalty=repetition_penalty, seed=seed, stop=stop,
                             stop_at_end=stop_at_end, state=state)
        text = "".join(stream)
        return Generation(text, stream.tokens, stream.finish)

    def generate_batch(self, prompts: Sequence[Text], *, max_tokens: int = 256, temperature: float = 1.0,
                       top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0,
                       seed: int = 0, stop: str | Sequence[str] = (), stop_at_end: bool = True) -> list[Generation]:
        """As generate, of several texts side by side."""
        options = self._options(max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop,
                                stop_at_end)
        ids = [self._prompt(f"prompt {i}", each) for i, each in enumerate(_several("generate_batch: prompts", prompts))]
        generated = self._model.generate(ids, options)
        return [Generation(each.text, each.tokens, each.finish) for each in generated]

    def stream(self, prompt: Text = "", *, max_tokens: int = 256, temperature: float = 1.0, top_k: int = 0,
               top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0, seed: int = 0,
               stop: str | Sequence[str] = (), stop_at_end: bool = True, state: State | None = None) -> Stream:
        """As generate, of one text: an iterator over it in whole characters, as they are written."""
        options = self._options(max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop,
                                stop_at_end)
        return Stream(self, prompt, options, state)

    def state(self, text: Text = "") -> State:
        """A sequence that begins with this text (nothing, where it is empty)."""
        state = State(self, _models.State(self._model))
        if len(text) > 0:
            state.feed(text)
        return state

    def load_state(self, path: str | os.PathLike[str]) -> State:
        """From a file of State.save or `flashgla generate --save-state`. ValueError when it is another model's."""
        state = _models.State(self._model)
        state.load(os.fspath(path))
        return State(self, state)

    def _prompt(self, name: str, text: Text, begins: bool = True) -> list[int]:
        if not isinstance(text, str):
            return _ids(name, text)
        try:
            return self._model.encode_prompt(text, begins)
        except TypeError:  # what is no text in UTF-8 never gets there
            raise ValueError(f"{name} has a lone surrogate, which is no character") from None

    @staticmethod
    def _options(max_tokens: int, temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float,
                 seed: int, stop: str | Sequence[str], stop_at_end: bool) -> _models.GenerateOptions:
        stops = [stop] if isinstance(stop, str) else _several("stop", stop)
        for each in stops:
            if not isinstance(each, str):
                raise TypeError(f"stop has {each!r}; expected texts")
        return _models.GenerateOptions(_whole("max_tokens", max_tokens), _real("temperature", temperature),
                                       _whole("top_k", top_k), _real("top_p", top_p), _real("min_p", min_p),
                                       _real("repetition_penalty", repetition_penalty), _whole("seed", seed), stops,
                                       bool(stop_at_end))


def _ids(name: str, ids: Any) -> list[int]:
    try:
        return [operator.index(each) for each in ids]
    except TypeError:
        raise TypeError(f"{name} is {ids!r:.60}; expected a text or token ids") from None


class Stream(Iterator[str]):
    """Text as a model writes it. `finish` and `tokens` are known when it has ended."""

    def __init__(self, model: LanguageModel, prompt: Text, options: _models.GenerateOptions, state: State | None):
        if state is not None and not isinstance(state, State):
            raise TypeError(f"state is {state!r:.60}; expected what LanguageModel.state gives")
        if state is not None and state._model is not model and state._model.fingerprint != model.fingerprint:
            raise ValueError("state is of another model")
        begins = state is None or state.tokens == 0
        state = state if state is not None else State(model, _models.State(model._model))
        ids = model._prompt("prompt", prompt, begins)
        if begins or ids:
            state._state.feed(ids)
        self._stream = _models.Stream(state._state, options)

    def __next__(self) -> str:
        text = self._stream.next()
        if not text:
            raise StopIteration
        return text

    def close(self) -> None:
        """Ends it before its time."""
        self._stream.close()

    @property
    def finish(self) -> str:
        return self._stream.finish

    @property
    def tokens(self) -> int:
        return self._stream.tokens
