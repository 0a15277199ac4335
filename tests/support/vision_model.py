"""A tiny Qwen3-VL model with random weights, in a folder that transformers and vLLM can load."""

from __future__ import annotations

import json
from pathlib import Path

from support.tokenizer import SPECIAL_TOKENS, make_tokenizer

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 4096, "longest_edge": 262144},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def write_vision_tokenizer(folder: Path) -> None:
    """Write the tokenizer and the settings of the image processor, without a model."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = make_tokenizer()
    backend.add_special_tokens(list(VISION))
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Qwen3VLProcessor",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    video = {**PREPROCESSOR, "video_processor_type": "Qwen3VLVideoProcessor"}
    del video["image_processor_type"]
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))


def write_vision_model(folder: Path, *, context: int = 8192) -> None:
    """Write a model of 0.3 million random parameters, with its tokenizer."""
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    write_vision_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(name) for name in (*VISION, "<|im_end|>")}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": context,
            "rope_scaling": {"rope_type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": True},
            "tie_word_embeddings": False,
            "eos_token_id": ids["<|im_end|>"],
            "initializer_range": 0.1,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.1,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config).to(torch.float32)
    # Larger weights make some tokens more likely than others. The weights of special tokens other than the end token
    # are 0, so that the model does not sample an image placeholder, which transformers would treat as an image.
    with torch.no_grad():
        model.lm_head.weight *= 5
        for name in (*VISION, *SPECIAL_TOKENS):
            if name != "<|im_end|>":
                model.lm_head.weight[tokenizer.token_to_id(name)] = 0
    model.save_pretrained(folder)
