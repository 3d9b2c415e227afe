"""flashgla.Tokenizer against the `tokenizers` package, in every style; many more strings: tokenizers_check.py."""

import json

import pytest

pytest.importorskip("tokenizers")

import tokenizer_styles

from flashgla import _models

TEXT = tokenizer_styles.corpus(1500)


@pytest.mark.parametrize("style", tokenizer_styles.STYLES)
def test_style_is_equal(style, tmp_path):
    theirs = tokenizer_styles.STYLES[style](TEXT)
    if theirs is None:
        pytest.skip("sentencepiece is not there")
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = _models.Tokenizer.load(str(tmp_path))
    specials = [token.content for token in theirs.get_added_tokens_decoder().values()]
    draw = tokenizer_styles.Strings(3, specials)
    assert not tokenizer_styles.differences(theirs, ours, [draw.draw() for _ in range(300)])
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1


def test_long_runs(tmp_path):
    theirs = tokenizer_styles.llama3(TEXT)
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = _models.Tokenizer.load(str(tmp_path / "tokenizer.json"))
    assert not tokenizer_styles.differences(theirs, ours, [c * 20000 for c in "a =\n.é1"])


def test_bytes_and_surrogates(tmp_path):
    theirs = tokenizer_styles.gpt2(TEXT)
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = _models.Tokenizer.load(str(tmp_path))
    for broken in (b"a\xffb", b"\xe2\x82", b"\xed\xa0\x80x", b"\xf0\x9f\x98"):
        assert ours.encode(broken) == theirs.encode(broken.decode("utf-8", errors="replace")).ids
    assert ours.encode("a\udc80") == ours.encode("a\udc80".encode("utf-8", "surrogatepass"))
    with pytest.raises(TypeError, match="encode: text is of type int"):
        ours.encode(1)
    with pytest.raises(ValueError, match="token is 100000"):
        ours.decode([100000])


def test_what_is_lacked_is_named(tmp_path):
    file = tmp_path / "tokenizer.json"
    theirs = tokenizer_styles.gpt2(TEXT)
    definition = json.loads(theirs.to_str())
    definition["pre_tokenizer"] = {"type": "UnicodeScripts"}
    file.write_text(json.dumps(definition))
    with pytest.raises(ValueError, match="tokenizer.json: pre_tokenizer: the pre-tokenizer UnicodeScripts"):
        _models.Tokenizer.load(str(file))
