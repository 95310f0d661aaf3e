"""Record logits of tiny models of Transformers, which needs torch:
`python tests/models/record_transformers.py`.

It writes `tests/models/transformers.json`: for each kind of model its config.json, and
the logits of every 16th id. Weights and tokens follow from names, shapes and
`weights_of`, so that no file of weights is needed.
"""

import json
import zlib
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("transformers.json")
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 12))
EVERY = 16
SHAPE = dict(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
STRETCHED = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0
)
CASES = {
    "llama": dict(),
    "llama 3.1, tied": dict(
        tie_word_embeddings=True,
        rope_scaling=STRETCHED | dict(original_max_position_embeddings=16),
    ),
    "qwen2": dict(),
    "qwen3": dict(head_dim=16),
    "gemma": dict(head_dim=16, num_key_value_heads=1),
    "gemma2": dict(
        head_dim=16,
        sliding_window=4,
        query_pre_attn_scalar=12,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=1.0,
    ),
    "gemma3_text": dict(
        head_dim=16,
        sliding_window=4,
        sliding_window_pattern=3,
        query_pre_attn_scalar=12,
        rope_scaling=dict(rope_type="linear", factor=8.0),
        rope_theta=1e6,
    ),
}


def weights_of(shapes):
    """Return arrays by name: normal values, seeded by the name; those of norms are near
    the value of no change.
    """
    made = {}
    for name, shape in shapes.items():
        values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
        made[name] = (
            values * (0.3 if len(shape) == 1 else 2 / np.sqrt(shape[-1]))
        ).astype(np.float32)
    return made


def main():
    """Write the file."""
    import torch
    import transformers

    torch.set_grad_enabled(False)
    found = {}
    for case, changes in CASES.items():
        kind = case.split()[0]
        config = transformers.AutoConfig.for_model(
            kind, **(SHAPE | changes), attn_implementation="eager"
        )
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        ).eval()
        state = {
            n: t
            for n, t in model.state_dict().items()
            if n != "lm_head.weight" or not config.tie_word_embeddings
        }
        arrays = weights_of(
            {name: tuple(tensor.shape) for name, tensor in state.items()}
        )
        model.load_state_dict(
            {name: torch.tensor(array) for name, array in arrays.items()}, strict=False
        )
        logits = model(torch.tensor(TOKENS)).logits.numpy()
        held = json.loads(config.to_json_string())
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        found[case] = dict(
            config=held,
            shapes=shapes,
            logits=np.round(logits[..., ::EVERY].astype(float), 6).tolist(),
        )
        print(case, logits.std())
    found["versions"] = dict(
        torch=torch.__version__, transformers=transformers.__version__
    )
    FILE.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
