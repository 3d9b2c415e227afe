"""Tokenizers in the styles that checkpoints ship, trained on the spot with the `tokenizers` package, and strings to try
them on. test_tokenizers.py compares a few, tokenizers_check.py as many as it is told to."""

from __future__ import annotations

import functools
import json
import random
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = """the of and to in a is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so what time up go about
than into could state only new year some take come these know see use get like then first any work now may such give
over think most even find day also after way many must look before great back through long where much should well people
down own just because good each those feel seem how high too place little world very still nation hand old life tell
write become here show house both between need mean call develop under last right move thing general school never same
another begin while number part turn real leave might want point form off child few small since against ask late home
interest large person end open public follow during present without again hold govern around possible head consider word
program problem however lead system set order eye plan run keep face fact group play stand increase early course change
help line don't I'm they'll we've he'd it's John's THE Quick BROWN naïve café Straße résumé Zürich привет мир как дела
日本語 の テスト 中文 分词 한국어 텍스트 עברית العربية हिन्दी ไทย ελληνικά""".split()

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
BLOOM = " ?[^(\\s|[.,!?…。，、।۔،])]+"
DEEPSEEK = ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}+"]

# Characters that came after Unicode 9: the libraries compared carry tables of different years, the oldest of that one.
NEWER = [(0x0560, 0x0560), (0x0588, 0x0588), (0x05EF, 0x05EF), (0x061D, 0x061D), (0x07FD, 0x07FF), (0x0860, 0x089F),
         (0x08B5, 0x08D3), (0x09FC, 0x09FE), (0x0A76, 0x0A76), (0x0AFA, 0x0AFF), (0x0B55, 0x0B55), (0x0C04, 0x0C04),
         (0x0C3C, 0x0C3C), (0x0C5D, 0x0C5D), (0x0C77, 0x0C77), (0x0C84, 0x0C84), (0x0CDD, 0x0CDD), (0x0D00, 0x0D00),
         (0x0D04, 0x0D04), (0x0D3B, 0x0D3C), (0x0D81, 0x0D81), (0x0E86, 0x0E93), (0x0E98, 0x0EA0), (0x0EA8, 0x0EBA),
         (0x170D, 0x171F), (0x180F, 0x180F), (0x1878, 0x1878), (0x1ABF, 0x1ACE), (0x1B4C, 0x1B7E), (0x1C90, 0x1CBF),
         (0x1CF2, 0x1CFA), (0x1DF6, 0x1DFA), (0x20BF, 0x20C0), (0x23FF, 0x23FF), (0x2B97, 0x2BFF), (0x2C2F, 0x2C5F),
         (0x2E45, 0x2E5D), (0x312E, 0x312F), (0x31BB, 0x31BF), (0x4DB6, 0x4DBF), (0x9FD6, 0x9FFF), (0xA7AF, 0xA7F6),
         (0xA82C, 0xA82C), (0xA8FE, 0xA8FF), (0xAB66, 0xAB6B), (0xFBC2, 0xFBC2), (0xFD40, 0xFDFF), (0x10000, 0x1F2FF),
         (0x1F6D3, 0x10FFFF)]


@functools.cache
def assigned(begin: int = 0x20, last: int = 0x1F6FF) -> list[str]:
    """Characters that every library in question knows, and knows the same of."""
    known = []
    for code in range(begin, last + 1):
        if any(low <= code <= high for low, high in NEWER):
            continue
        if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co"):
            known.append(chr(code))
    return known


class Strings:
    """Drawn strings: words, random characters, long runs, whitespace of all kinds, numbers, code, special tokens."""

    def __init__(self, seed: int, specials: list[str]):
        self.random = random.Random(seed)
        self.characters = assigned()
        self.repeated = self.characters + list(" \n-=aA.") * 200
        self.specials = specials

    def draw(self) -> str:
        return "".join(self.part() for _ in range(self.random.randrange(8)))

    def part(self) -> str:
        choose = self.random
        kind = choose.randrange(14)
        if kind < 4:
            return " ".join(choose.choice(WORDS) for _ in range(choose.randrange(1, 8)))
        if kind == 4:
            return "".join(choose.choice(self.characters) for _ in range(choose.randrange(1, 9)))
        if kind == 5:
            block = choose.choice(((0x20, 0x7F), (0xA0, 0x24F), (0x300, 0x52F), (0x590, 0x6FF), (0x900, 0xDFF),
                                   (0x1100, 0x11FF), (0x1E00, 0x206F), (0x2100, 0x27BF), (0x3000, 0x30FF),
                                   (0x4E00, 0x4FFF), (0xAC00, 0xAD00), (0xFB00, 0xFB4F), (0xFF00, 0xFFEF),
                                   (0x1F300, 0x1F64F)))
            known = assigned(*block)
            return "".join(choose.choice(known) for _ in range(choose.randrange(1, 9)))
        if kind == 6:
            return choose.choice(self.repeated) * choose.randrange(1, 80)
        if kind == 7:
            spaces = " \t\n\r\x0b\x0c\x85\xa0\u1680\u2003\u2028\u2029\u202f\u3000\u180e\u200b\u00ad\ufeff"
            return "".join(choose.choice(spaces) for _ in range(choose.randrange(1, 6)))
        if kind == 8:
            return " " * choose.randrange(1, 30)
        if kind == 9:
            return str(choose.randrange(10 ** choose.randrange(1, 12))) + choose.choice(["", ",", ".", "½", "٣", "Ⅷ"])
        if kind == 10:
            return choose.choice(["def f(x):\n    return x[0] != 'y'\n", "a->b && c || !d;", "{\"key\": [1, 2]}", "\r\n",
                                  "https://example.org/?q=a+b", "x\u0301\u0327", "\U0001F468\u200D\U0001F469", "'S 'Ll",
                                  "\u2581", "\u2581a", "<0x41>", "I'm 'tis", "ÅÅ ﬁ ①", "\uc950\u11a7\u11a8", "\0", "\x7f"])
        if kind == 11 and self.specials:
            return choose.choice(["", " ", "x", "\u00e9"]) + choose.choice(self.specials) + choose.choice(["", "  ", "y"])
        return choose.choice([" ", ".", ", ", "\n", "\n\n", "? ", " - ", "("]) + choose.choice(WORDS)


def corpus(lines: int = 3000) -> list[str]:
    draw = Strings(7, [])
    return [" ".join(draw.random.choice(WORDS) for _ in range(12)) + "." if i % 3 else draw.draw() for i in range(lines)]


def _bpe(vocab_size: int = 1500, **trainer) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **trainer)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _with_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """The trained BPE with <unk>, <s>, </s> and a token a byte before its own, as LLaMA-2's files have them."""
    data = json.loads(tokenizer.to_str())
    first = ["<unk>", "<s>", "</s>"] + BYTES
    trained = sorted(data["model"]["vocab"].items(), key=lambda item: item[1])
    data["model"]["vocab"] = {token: i for i, token in enumerate(first + [t for t, _ in trained if t not in first])}
    data["model"].update(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    data["added_tokens"] = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                             "normalized": False, "special": True} for i, token in enumerate(first[:3])]
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}
    return Tokenizer.from_str(json.dumps(data))


def _llama_decoder():
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                              decoders.Strip(" ", 1, 0)])


def gpt2(text, pre_tokenizer=None):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    t.train_from_iterator(text, _bpe(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                     special_tokens=["<|endoftext|>"]))
    return t


def roberta(text):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(text, _bpe(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                     special_tokens=["<s>", "<pad>", "</s>"]))
    t.add_special_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<r>", rstrip=True)])
    t.add_tokens([AddedToken("word", single_word=True), AddedToken("Zürich", single_word=True, lstrip=True)])
    t.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return t


def neox(text):
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(text, _bpe(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                     special_tokens=["<|endoftext|>", "<|padding|>"]))
    t.add_tokens([AddedToken(" " * n, normalized=True) for n in range(24, 1, -1)])
    return t


def llama3(text):
    t = Tokenizer(models.BPE(ignore_merges=True))
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(text, _bpe(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    t.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    bos = t.token_to_id("<|begin_of_text|>")
    t.post_processor = processors.Sequence([
        processors.ByteLevel(), processors.TemplateProcessing(single="<|begin_of_text|> $A", pair="$A $B",
                                                              special_tokens=[("<|begin_of_text|>", bos)])])
    return t


def _split(pattern):
    def make(text):
        t = gpt2(text, pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]))
        t.normalizer = normalizers.NFC()
        return t

    return make


def starcoder(text):
    return gpt2(text, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False)]))


def deepseek(text):
    return gpt2(text, pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(p), "isolated") for p in DEEPSEEK] +
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]))


def clip(text):
    """Bytes, an end of word, lower case; no decoder."""
    t = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    t.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "),
                                         normalizers.Lowercase()])
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), "removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.train_from_iterator(text, _bpe(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), end_of_word_suffix="</w>",
                                     special_tokens=["<unk>"]))
    return t


def words(text):
    """Characters with unknown ones, marks taken off, prefixes within words."""
    t = Tokenizer(models.BPE(unk_token="[UNK]", fuse_unk=False, continuing_subword_prefix="##"))
    t.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Strip(),
                                         normalizers.Lowercase()])
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation("contiguous"),
                                               pre_tokenizers.Digits()])
    t.train_from_iterator(text[:600], _bpe(700, special_tokens=["[UNK]"], continuing_subword_prefix="##",
                                           limit_alphabet=60))
    return t


def llama2(text):
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = _llama_decoder()
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    t.train_from_iterator(text, _bpe(limit_alphabet=90))
    t.pre_tokenizer = None
    return _with_bytes(t)


def mistral(text):
    t = Tokenizer(models.BPE())
    t.decoder = _llama_decoder()
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    t.train_from_iterator(text, _bpe(limit_alphabet=90))
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _with_bytes(t)


def gemma(text):
    """Merges across words, so that texts are not cut into them."""
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.Replace(" ", "▁")
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    t.train_from_iterator(text[:600], _bpe(limit_alphabet=90, max_token_length=16))
    t.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return _with_bytes(t)


def _unigram(text, tokenizer, **trainer):
    tokenizer.train_from_iterator(
        [line for line in text if max(line, default="") < "\u0250"], trainers.UnigramTrainer(vocab_size=1200, show_progress=False, unk_token="<unk>",
                                      special_tokens=["<pad>", "</s>", "<unk>"], **trainer))
    return tokenizer


def t5(text):
    t = Tokenizer(models.Unigram())
    t.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(),
                                         normalizers.Replace(Regex(" {2,}"), " ")])
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(),
                                               pre_tokenizers.Metaspace(prepend_scheme="always")])
    t.decoder = decoders.Metaspace(prepend_scheme="always")
    _unigram(text, t)
    t.post_processor = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>",
                                                     special_tokens=[("</s>", 1)])
    return t


def unigram_bytes(text):
    """The whole text as one piece; unknown characters as bytes."""
    t = Tokenizer(models.Unigram())
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    _unigram(text, t)
    data = json.loads(t.to_str())
    data["model"]["vocab"] += [[token, 0.0] for token in BYTES]
    data["model"]["byte_fallback"] = True
    t = Tokenizer.from_str(json.dumps(data))
    t.decoder = _llama_decoder()
    return t


def xlm_roberta(text):
    """SentencePiece's own normaliser, as `precompiled_charsmap`; None without the sentencepiece package."""
    try:
        import io

        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        return None
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(text), model_writer=out, vocab_size=900,
                                             model_type="unigram", minloglevel=2, character_coverage=0.99)
    proto = sentencepiece_model_pb2.ModelProto.FromString(out.getvalue())
    t = Tokenizer(models.Unigram([(p.piece, p.score) for p in proto.pieces], 0, False))
    t.normalizer = normalizers.Sequence([normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap),
                                         normalizers.Replace(Regex(" {2,}"), " ")])
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    t.decoder = decoders.Metaspace()
    t.add_special_tokens(["<s>", "</s>", "<unk>"])
    return t


STYLES = {"gpt2": gpt2, "roberta": roberta, "neox": neox, "llama3": llama3, "qwen2": _split(QWEN2),
          "gpt4o": _split(GPT4O), "bloom": _split(BLOOM), "starcoder": starcoder, "deepseek": deepseek, "clip": clip,
          "words": words, "llama2": llama2, "mistral": mistral, "gemma": gemma, "t5": t5,
          "unigram_bytes": unigram_bytes, "xlm_roberta": xlm_roberta}


def differences(theirs: Tokenizer, ours, strings: list[str], limit: int = 5) -> list[str]:
    """What is different, in words: ids with and without special tokens, and the text of the ids."""
    found = []
    for text, plain, special in zip(strings, theirs.encode_batch(strings, add_special_tokens=False),
                                    theirs.encode_batch(strings)):
        ids = ours.encode(text)
        if ids != plain.ids:
            found.append(f"encode({text!r}): {ids}, expected {plain.ids}")
        elif ours.encode(text, add_special_tokens=True) != special.ids:
            found.append(f"encode({text!r}, add_special_tokens=True): expected {special.ids}")
        elif ours.decode(ids) != (decoded := theirs.decode(ids)):
            found.append(f"decode({ids}): {ours.decode(ids)!r}, expected {decoded!r}")
        if len(found) >= limit:
            break
    return found
