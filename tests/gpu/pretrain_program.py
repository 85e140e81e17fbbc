"""A small training program on `megatron.training.pretrain` with mock data, as users write them.

Run by `test_pretrain_gpu.py` through `python -m gds_optimizer.megatron`. It knows nothing about
streaming. At its end it prints the SHA-256 of all parameters and the losses of all steps.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from functools import partial
from typing import Any

import torch
from megatron.core import __version__
from megatron.core.datasets import utils as datasets_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

seen: dict[str, Any] = {"losses": []}


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    args = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def datasets_provider(sample_counts: Any, vp_stage: int | None = None) -> Any:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        split=args.split or "1,0,0",
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset, sample_counts, lambda: True, config
    ).build()


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    seen["losses"].append((loss / tokens).item().hex())
    report = torch.cat([loss.clone().detach().view(1), tokens.view(1)])
    return loss, tokens, {"lm loss": report}


def forward_step(data_iterator: Any, model: Any, *unused: Any) -> Any:
    seen["model"] = model
    batch = {key: value.cuda() for key, value in next(data_iterator).items() if value is not None}
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, partial(loss_func, batch["loss_mask"])


def report() -> None:
    digest = hashlib.sha256()
    for name, param in seen["model"].named_parameters():
        digest.update(name.encode())
        digest.update(param.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    print(
        "RESULT",
        json.dumps(
            {
                "version": __version__,
                "rank": int(os.environ["RANK"]),
                "params": digest.hexdigest(),
                "losses": seen["losses"],
                "optimizer": seen.get("optimizer"),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    # The wheel brings its C++ helpers compiled, without the Makefile that this wants to run.
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        datasets_utils.compile_helpers = lambda: None
    datasets_provider.is_distributed = True
    arguments = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    container = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    try:
        pretrain(
            container,
            datasets_provider,
            ModelType.encoder_or_decoder,
            forward_step,
            model_provider=model_provider,
        )
    finally:  # it leaves by SystemExit where --exit-interval ends it
        report()
