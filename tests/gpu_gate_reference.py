"""Makes `data/gpu_gate.npz`: what transformers on a CPU, in float32, says of the demo model, for the GPU gate
to be held to.

    python tests/gpu_gate_reference.py

``logprobs [20, 255]`` float32: of the tokens of 20 windows of 256 tokens of the text in `data`, each after
those before it, no BOS; their perplexity is that of `test_perplexity`. ``prompts``, ``tokens [n, 32]``: what
it writes after some prompts, the likeliest token each time, and ``margins``: by how much that one's
log-probability is above the next one's.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"
N_WINDOWS, WINDOW_TOKENS, N_TOKENS = 20, 256, 32
WINDOWS_SHA256 = "4b1374b004e4fc40c45c3826330945c79430de6700209e98e6dc89bb71ce1a7c"
PROMPTS = (
    "The capital of France is",
    "Gravity is a fundamental interaction, and the one that",
    "In 1687 Isaac Newton published a book in which he",
    "A list of the planets, from the sun outwards: Mercury,",
)


def main() -> None:
    import torch
    from test_demo_model import demo_file
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from jaxlamina.bench.perplexity import windows_of
    from jaxlamina.weights import open_checkpoint

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(demo_file()), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    model = model.eval()
    tokenizer = open_checkpoint("smollm2-135m-instruct").tokenizer()
    text = (DATA / "wiki.test.raw.head").read_text(encoding="utf-8")
    windows = windows_of(tokenizer.encode(text, add_special_tokens=False), N_WINDOWS, WINDOW_TOKENS)
    assert hashlib.sha256(windows.astype("<i4").tobytes()).hexdigest() == WINDOWS_SHA256
    logprobs = []
    with torch.no_grad():
        for row in windows:
            of_row = torch.log_softmax(model(torch.tensor(row[None])).logits[0, :-1].float(), -1).numpy()
            logprobs.append(of_row[np.arange(WINDOW_TOKENS - 1), row[1:]])
        prompts = [tokenizer.encode(p, add_special_tokens=False) for p in PROMPTS]
        tokens, margins = np.zeros((len(prompts), N_TOKENS), np.int32), np.zeros((len(prompts), N_TOKENS))
        for i, prompt in enumerate(prompts):
            for j in range(N_TOKENS):
                logits = model(torch.tensor([[*prompt, *map(int, tokens[i, :j])]])).logits[0, -1].float()
                best, second = torch.log_softmax(logits, -1).topk(2).values.tolist()
                tokens[i, j], margins[i, j] = int(logits.argmax()), best - second
    longest = max(map(len, prompts))
    padded = np.array([p + [-1] * (longest - len(p)) for p in prompts], np.int32)
    np.savez_compressed(
        DATA / "gpu_gate.npz",
        windows=windows.astype(np.uint16),
        logprobs=np.array(logprobs, np.float32),
        prompts=padded,
        tokens=tokens,
        margins=margins.astype(np.float32),
    )
    print(f"perplexity {math.exp(-np.mean(np.array(logprobs, np.float64))):.4f}")
    print("smallest margins", np.sort(margins.ravel())[:6])


if __name__ == "__main__":
    main()
