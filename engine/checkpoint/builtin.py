"""The built-in checkpoints: sizes and statistics of the golden rollouts, for use without a download or a GPU.

Each config is a `config.json` in the release's layout, plus the size of a camera view and the tokenizer.
"""

from typing import Any


def _config(
    view: tuple[int, int],
    dit: dict[str, Any],
    text: dict[str, int],
    image: dict[str, int],
    vae: dict[str, Any],
    **head: int,
) -> dict[str, Any]:
    return {
        "model_type": "vla",
        "action_dim": 32,
        "action_horizon": 24,
        "action_head_cfg": {
            "config": {
                "action_horizon": 24,
                "max_action_dim": 32,
                "max_state_dim": 64,
                "num_frames": 33,
                "decouple_inference_noise": False,
                "diffusion_model_cfg": {
                    "model_type": "i2v", "in_dim": 36, "out_dim": 16, "freq_dim": 256, "text_len": 512,
                    "max_chunk_size": 4, "num_frame_per_block": 2, "num_action_per_block": 24,
                    "num_state_per_block": 1, "eps": 1e-6, **dit,
                },
                "text_encoder_cfg": {"vocab": 384, "num_buckets": 32, **text},
                "image_encoder_cfg": {"image_size": 224, "patch_size": 14, "vision_mlp_ratio": 4, **image},
                "vae_cfg": vae,
                **head,
            }
        },
        "view_height": view[0],
        "view_width": view[1],
        "tokenizer": "byt5",
        "synthetic_weights": True,
    }  # fmt: skip


BUILTIN_CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": _config(
        view=(32, 64),
        dit={
            "dim": 128, "ffn_dim": 256, "num_heads": 4, "num_layers": 3, "text_dim": 64, "hidden_size": 64,
            "frame_seqlen": 32,
        },
        text={"dim": 64, "dim_attn": 64, "dim_ffn": 128, "num_heads": 4, "num_layers": 2},
        image={"vision_dim": 64, "vision_heads": 4, "vision_layers": 3},
        vae={"z_dim": 16, "dim": 16},
    ),
    "mid": _config(
        view=(88, 160),
        dit={
            "dim": 512, "ffn_dim": 2048, "num_heads": 8, "num_layers": 8, "text_dim": 256, "hidden_size": 256,
            "frame_seqlen": 220,
        },
        text={"dim": 256, "dim_attn": 256, "dim_ffn": 512, "num_heads": 8, "num_layers": 6},
        image={"vision_dim": 256, "vision_heads": 8, "vision_layers": 6},
        vae={"z_dim": 16, "dim": 32},
    ),
    # DROID's widths and views with two layers of each transformer, and as few words as bytes need.
    "droid-2l": _config(
        view=(176, 320),
        dit={
            "dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 2, "text_dim": 4096, "hidden_size": 1024,
            "frame_seqlen": 880,
        },
        text={"dim": 4096, "dim_attn": 4096, "dim_ffn": 10240, "num_heads": 64, "num_layers": 2},
        image={"vision_dim": 1280, "vision_heads": 16, "vision_layers": 2},
        vae={"z_dim": 16, "dim": 96},
    ),
    # The small backbone (spec section 8), smaller still.
    "wan22-tiny": _config(
        view=(44, 80),
        dit={
            "model_type": "ti2v", "in_dim": 48, "out_dim": 48, "dim": 96, "ffn_dim": 192, "num_heads": 3,
            "num_layers": 3, "text_dim": 64, "hidden_size": 64, "frame_seqlen": 8, "concat_first_frame_latent": False,
        },
        text={"dim": 64, "dim_attn": 64, "dim_ffn": 128, "num_heads": 4, "num_layers": 2},
        image={"vision_dim": 64, "vision_heads": 4, "vision_layers": 3},
        vae={"_target_": "WanVideoVAE38", "z_dim": 48, "dim": 16, "dec_dim": 24},
        target_video_height=64,
        target_video_width=128,
    ),
}  # fmt: skip

BUILTIN_STATISTICS: dict[str, Any] = {
    "oxe_droid": {
        "statistics": {
            "state": {
                "joint_position": {
                    "q01": [-0.9, -1.1, -0.8, -2.9, -1.2, 0.6, -1.6],
                    "q99": [0.9, 1.2, 0.8, -0.5, 1.2, 3.1, 1.7],
                },
                "gripper_position": {"q01": [0.0], "q99": [1.0]},
            },
            "action": {
                "joint_position": {
                    "q01": [-0.31, -0.42, -0.29, -0.38, -0.35, -0.33, -0.45],
                    "q99": [0.33, 0.4, 0.3, 0.39, 0.34, 0.36, 0.44],
                },
                "gripper_position": {"q01": [0.0], "q99": [1.0]},
            },
        }
    }
}
