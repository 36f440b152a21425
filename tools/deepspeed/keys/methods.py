"""Keys of methods that change the model or the data: curricula, dropped layers, quantisation, pruning, elasticity."""

from trainwright.tools.deepspeed.key import (
    ANY,
    BOOL,
    LIST,
    MAPPING,
    NUMBER,
    TEXT,
    UNSUPPORTED,
    WHOLE,
    Key,
    alike,
    within,
)

_OUT = "Take the section out of the file to train without it."
_CURRICULUM = f"The data module decides which samples come when, and how long they are. {_OUT}"
_DROPPED = f"The module decides which tokens and layers it computes with. {_OUT}"
_COMPRESSED = f"Models are trained as they are; quantise and prune with a library of its own, in the module. {_OUT}"
_ATTENTION = f"Attention is the model's own. {_OUT}"
_ELASTIC = (
    "global_batch_size stays what it is on any number of ranks; launch.min_devices lets a run go on with fewer. " + _OUT
)


def _switched(section: str, note: str, *keys: Key) -> tuple[Key, ...]:
    """A section that stops a run while it is on."""
    enabled = Key("enabled", BOOL, UNSUPPORTED, "", note, harmless=(False,), stops=True)
    return within(section, enabled, *keys, switch="enabled")


_SCHEDULE = within(
    "schedule_config",
    *alike(
        UNSUPPORTED,
        _CURRICULUM,
        total_curriculum_step=WHOLE,
        difficulty_step=WHOLE,
        root_degree=WHOLE,
        difficulty=LIST,
        max_step=LIST,
    ),
)
_DIFFICULTY = (
    *alike(
        UNSUPPORTED,
        _CURRICULUM,
        min_difficulty=WHOLE,
        max_difficulty=WHOLE,
        schedule_type=TEXT,
    ),
    *_SCHEDULE,
)

DATA = (
    *_switched(
        "curriculum_learning",
        _CURRICULUM,
        *alike(UNSUPPORTED, _CURRICULUM, curriculum_type=TEXT),
        *_DIFFICULTY,
    ),
    *within(
        "data_efficiency",
        Key("enabled", BOOL, UNSUPPORTED, "", _CURRICULUM, harmless=(False,), stops=True),
        Key("seed", WHOLE, UNSUPPORTED, "", "trainer.data_seed seeds the order of samples."),
        *within(
            "data_sampling",
            Key("enabled", BOOL, UNSUPPORTED, "", _CURRICULUM),
            *alike(
                UNSUPPORTED,
                "max_epochs= says how often the data are read; the DataLoader of the data module has its own workers.",
                num_epochs=WHOLE,
                num_workers=WHOLE,
                pin_memory=BOOL,
            ),
            *within(
                "curriculum_learning",
                Key("enabled", BOOL, UNSUPPORTED, "", _CURRICULUM),
                Key("data_cluster_path", TEXT, UNSUPPORTED, "", _CURRICULUM),
                *within(
                    "curriculum_metrics.*",
                    *alike(
                        UNSUPPORTED,
                        _CURRICULUM,
                        index_to_sample_path=TEXT,
                        index_to_metric_path=TEXT,
                        difficulty_type=TEXT,
                        clustering_type=TEXT,
                    ),
                    *_DIFFICULTY,
                ),
            ),
            *within(
                "dynamic_batching",
                *alike(
                    UNSUPPORTED,
                    "A batch has as many samples as global_batch_size says.",
                    enabled=BOOL,
                    metrics_path=TEXT,
                    lr_scaling_method=TEXT,
                    min_batch_size=WHOLE,
                    max_batch_size=WHOLE,
                    sequence_picking_order=TEXT,
                    max_tokens=WHOLE,
                    verbose=BOOL,
                ),
            ),
        ),
        *within(
            "data_routing",
            Key("enabled", BOOL, UNSUPPORTED, "", _DROPPED),
            *within(
                "random_ltd",
                *alike(
                    UNSUPPORTED,
                    _DROPPED,
                    enabled=BOOL,
                    total_layer_num=WHOLE,
                    random_ltd_layer_num=WHOLE,
                    random_ltd_layer_id=LIST,
                    model_mask_name=TEXT,
                    model_type=TEXT,
                    hidden_state_order=TEXT,
                    micro_batch_size=WHOLE,
                    global_batch_size=WHOLE,
                ),
                *within(
                    "random_ltd_schedule",
                    *alike(UNSUPPORTED, _DROPPED, min_value=WHOLE, max_value=WHOLE, schedule_type=TEXT),
                    *within("schedule_config", *alike(UNSUPPORTED, _DROPPED, require_steps=WHOLE, seq_per_step=WHOLE)),
                ),
                *within(
                    "layer_token_lr_schedule",
                    *alike(
                        UNSUPPORTED,
                        _DROPPED,
                        enabled=BOOL,
                        total_layer_tokens=WHOLE,
                        warmup_type=TEXT,
                        warmup_layer_tokens=WHOLE,
                    ),
                ),
            ),
        ),
        switch="enabled",
    ),
    *_switched("progressive_layer_drop", _DROPPED, *alike(UNSUPPORTED, _DROPPED, theta=NUMBER, gamma=NUMBER)),
)

_GROUPS = within(
    "different_groups.*",
    Key("modules", ANY, UNSUPPORTED, "", _COMPRESSED),
    Key("related_modules", ANY, UNSUPPORTED, "", _COMPRESSED),
    *within(
        "params",
        *alike(
            UNSUPPORTED,
            _COMPRESSED,
            start_bits=WHOLE,
            target_bits=WHOLE,
            quantization_period=WHOLE,
            bits=WHOLE,
            dense_ratio=NUMBER,
        ),
    ),
)
_MIXED = within(
    "fp16_mixed_quantize",
    *alike(UNSUPPORTED, _COMPRESSED, enabled=BOOL, quantize_change_ratio=NUMBER),
)
_PRUNING = ("sparse_pruning", "row_pruning", "head_pruning", "channel_pruning")


def _technique(name: str, *shared: Key) -> tuple[Key, ...]:
    switch = f"{name}.shared_parameters.enabled"
    keys = within(
        name,
        *within(
            "shared_parameters",
            Key("enabled", BOOL, UNSUPPORTED, "", _COMPRESSED, harmless=(False,), stops=True),
            *alike(UNSUPPORTED, _COMPRESSED, schedule_offset=WHOLE, schedule_offset_end=WHOLE),
            *shared,
        ),
        *_GROUPS,
    )
    return within("compression_training", *keys, switch=switch)


COMPRESSED = (
    *_technique(
        "weight_quantization",
        *alike(
            UNSUPPORTED,
            _COMPRESSED,
            quantizer_kernel=BOOL,
            quantize_groups=WHOLE,
            quantize_verbose=BOOL,
            quantization_type=TEXT,
            rounding=TEXT,
            quantize_weight_in_forward=BOOL,
        ),
        *_MIXED,
    ),
    *_technique(
        "activation_quantization",
        *alike(UNSUPPORTED, _COMPRESSED, quantization_type=TEXT, range_calibration=TEXT),
    ),
    *(
        key
        for name in _PRUNING
        for key in _technique(
            name,
            *alike(
                UNSUPPORTED,
                _COMPRESSED,
                method=TEXT,
                num_heads=WHOLE,
                schedule_offset_stride=WHOLE,
                block_pattern=TEXT,
                dense_ratio=NUMBER,
                excluded_modules=LIST,
            ),
        )
    ),
    *within(
        "compression_training",
        *_switched(
            "layer_reduction",
            _COMPRESSED,
            *alike(
                UNSUPPORTED,
                _COMPRESSED,
                keep_number_layer=WHOLE,
                module_name_prefix=TEXT,
                teacher_layer=LIST,
                other_module_name=LIST,
            ),
        ),
    ),
    *_switched(
        "quantize_training",
        _COMPRESSED,
        *alike(
            UNSUPPORTED,
            _COMPRESSED,
            quantize_verbose=BOOL,
            quantizer_kernel=BOOL,
            quantize_type=TEXT,
            quantize_groups=WHOLE,
            quantize_weight_in_forward=BOOL,
            rounding=TEXT,
        ),
        *within("quantize_bits", *alike(UNSUPPORTED, _COMPRESSED, start_bits=WHOLE, target_bits=WHOLE)),
        *within("quantize_schedule", *alike(UNSUPPORTED, _COMPRESSED, quantize_period=WHOLE, schedule_offset=WHOLE)),
        *within("quantize_algo", *alike(UNSUPPORTED, _COMPRESSED, q_type=TEXT, rounding=TEXT)),
        *_MIXED,
    ),
    *_switched(
        "eigenvalue",
        _COMPRESSED,
        *alike(
            UNSUPPORTED,
            _COMPRESSED,
            verbose=BOOL,
            max_iter=WHOLE,
            tol=NUMBER,
            stability=NUMBER,
            gas_boundary_resolution=WHOLE,
            layer_name=TEXT,
            layer_num=WHOLE,
        ),
    ),
    *within(
        "weight_quantization",
        Key("enabled", BOOL, UNSUPPORTED, "", _COMPRESSED, harmless=(False,)),
        *(
            Key(name, MAPPING, UNSUPPORTED, "", _COMPRESSED, harmless=({},), stops=True)
            for name in ("quantized_initialization", "post_init_quant")
        ),
        *alike(UNSUPPORTED, _COMPRESSED, q_type=TEXT, q_groups=WHOLE),
    ),
)

ATTENTION = within(
    "sparse_attention",
    Key("mode", TEXT, UNSUPPORTED, "", _ATTENTION, harmless=("dense",), stops=True),
    *alike(
        UNSUPPORTED,
        _ATTENTION,
        block=WHOLE,
        different_layout_per_head=BOOL,
        num_local_blocks=WHOLE,
        num_global_blocks=WHOLE,
        attention=TEXT,
        horizontal_global_attention=BOOL,
        num_different_global_patterns=WHOLE,
        num_random_blocks=WHOLE,
        local_window_blocks=LIST,
        global_block_indices=LIST,
        global_block_end_indices=LIST,
        num_sliding_window_blocks=WHOLE,
    ),
)

ELASTICITY = _switched(
    "elasticity",
    _ELASTIC,
    *alike(
        UNSUPPORTED,
        _ELASTIC,
        max_train_batch_size=WHOLE,
        micro_batch_sizes=LIST,
        min_gpus=WHOLE,
        max_gpus=WHOLE,
        min_time=NUMBER,
        version=NUMBER,
        prefer_larger_batch=BOOL,
        prefer_large_batch=BOOL,
        ignore_non_elastic_batch_info=BOOL,
        num_gpus_per_node=WHOLE,
        model_parallel_size=WHOLE,
    ),
)

KEYS = (*DATA, *COMPRESSED, *ATTENTION, *ELASTICITY)
