"""Makes a small checkpoint of the LLaMA layout for harness_check.py, as transformers writes it: random weights, and a
tokenizer trained here. Needs torch, transformers and tokenizers, no network.

    python scripts/paper/harness_checkpoint.py OUT [--style llama3|llama2] [--positions 256]
"""

import argparse
import pathlib
import sys

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python" / "tests"))
import tokenizer_styles

BOS_EOS = {"llama3": ("<|begin_of_text|>", "<|end_of_text|>"), "llama2": ("<s>", "</s>")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--style", choices=BOS_EOS, default="llama3", help="of the tokenizer")
    parser.add_argument("--positions", type=int, default=256)
    arguments = parser.parse_args()
    tokenizer = tokenizer_styles.STYLES[arguments.style](tokenizer_styles.corpus(600))
    bos, eos = BOS_EOS[arguments.style]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos,
        model_max_length=arguments.positions).save_pretrained(arguments.out)
    torch.manual_seed(7)
    # Weights well above the usual 0.02, so that a token's probability depends on what stands before it.
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=128, intermediate_size=320, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=arguments.positions,
        initializer_range=0.15, tie_word_embeddings=False, bos_token_id=tokenizer.token_to_id(bos),
        eos_token_id=tokenizer.token_to_id(eos))
    model = transformers.LlamaForCausalLM(config).float()
    model.save_pretrained(arguments.out)
    print(f"{arguments.out}: {model.num_parameters()} parameters, {config.vocab_size} tokens")


if __name__ == "__main__":
    main()
