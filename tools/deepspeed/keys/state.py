"""Keys of ZeRO, offload, checkpoints of activations and of runs."""

from trainwright.tools.deepspeed.key import (
    APPROXIMATED,
    BOOL,
    MAPPED,
    MAPPING,
    NUMBER,
    TEXT,
    UNSUPPORTED,
    WHOLE,
    Key,
    alike,
    within,
)

DEVICES = ("none", "cpu", "nvme")
_CHOSEN = "nothing: the strategy chooses"
_IO = "There is no tier below host memory, so nothing is read from or written to a drive in training."

_OFFLOAD_OPTIMIZER = within(
    "offload_optimizer",
    Key(
        "device",
        TEXT,
        MAPPED,
        "strategy.offload=optimizer",
        "cpu: state and stepped rows in host memory. nvme: in host memory too, which must be large enough.",
        words=DEVICES,
    ),
    *alike(UNSUPPORTED, _IO, nvme_path=TEXT, buffer_count=WHOLE, fast_init=BOOL),
    *alike(UNSUPPORTED, _IO, pipeline_read=BOOL, pipeline_write=BOOL, pipeline=BOOL),
    Key("pin_memory", BOOL, APPROXIMATED, "", "Host memory is pinned where there is a GPU."),
    Key(
        "ratio",
        NUMBER,
        APPROXIMATED,
        "",
        "All of the state is offloaded, not a part of it.",
        harmless=(1,),
    ),
    *alike(
        APPROXIMATED,
        "The optimizer of torch steps on the CPU, with the threads of launch.threads.",
        super_offload=BOOL,
        cpuadam_cores_perc=NUMBER,
    ),
)

_OFFLOAD_PARAMETERS = within(
    "offload_param",
    Key(
        "device",
        TEXT,
        MAPPED,
        "strategy.offload=parameters",
        "Stage 3: parameters, gradients and optimizer state in host memory. nvme: in host memory too, which must be "
        "large enough.",
        words=DEVICES,
    ),
    *alike(UNSUPPORTED, _IO, nvme_path=TEXT, buffer_count=WHOLE, buffer_size=WHOLE, max_in_cpu=WHOLE),
    Key("pin_memory", BOOL, APPROXIMATED, "", "Host memory is pinned where there is a GPU."),
)

_STAGE_3 = alike(
    APPROXIMATED,
    "Stage 3 gathers block by block and the next block ahead (torch's fully_shard); strategy.blocks names them.",
    stage3_max_live_parameters=WHOLE,
    stage3_max_reuse_distance=WHOLE,
    stage3_module_granularity_threshold=WHOLE,
    stage3_use_all_reduce_for_fetch_params=BOOL,
    stage3_allgather_sequential=BOOL,
    max_live_parameters=WHOLE,
    max_reuse_distance=WHOLE,
    module_granularity_threshold=WHOLE,
    use_all_reduce_for_fetch_params=BOOL,
    allgather_sequential=BOOL,
    sub_group_size=WHOLE,
    memory_efficient_linear=BOOL,
    override_module_apply=BOOL,
)

ZERO = within(
    "zero_optimization",
    Key(
        "stage",
        WHOLE,
        MAPPED,
        "strategy=ddp|zero1|zero2|zero3",
        "0: ddp. With pipeline, tensor, sequence or expert parallelism strategy=hybrid with strategy.stage.",
        words=(0, 1, 2, 3),
    ),
    Key(
        "contiguous_gradients",
        BOOL,
        APPROXIMATED,
        "",
        "Gradients are packed into buckets in any case.",
        harmless=(True,),
    ),
    Key(
        "reduce_scatter",
        BOOL,
        APPROXIMATED,
        "",
        "Stages 1 to 3 always reduce-scatter, with the same result.",
        harmless=(True,),
    ),
    Key(
        "reduce_bucket_size",
        WHOLE,
        MAPPED,
        "strategy.bucket_mib",
        "Elements become MiB (stages 1 and 2); stage 3 reduces block by block.",
        auto=_CHOSEN,
    ),
    *alike(
        APPROXIMATED,
        "Buckets are reduce-scattered to all ranks at once.",
        use_multi_rank_bucket_allreduce=BOOL,
    ),
    Key(
        "allgather_partitions",
        BOOL,
        APPROXIMATED,
        "",
        "Stepped rows are gathered by all-gather, never by broadcasts.",
        harmless=(True,),
    ),
    Key(
        "allgather_bucket_size",
        WHOLE,
        APPROXIMATED,
        "",
        "Rows are gathered by the buckets of strategy.bucket_mib.",
        auto=_CHOSEN,
    ),
    Key(
        "overlap_comm",
        BOOL,
        APPROXIMATED,
        "",
        "Reduction always overlaps backward.",
        harmless=(True,),
        auto=_CHOSEN,
    ),
    Key(
        "compute_grad_norm",
        BOOL,
        APPROXIMATED,
        "",
        "The norm is computed where something is clipped by it.",
        harmless=(True,),
    ),
    *alike(
        APPROXIMATED,
        "Checkpoints hold weights and optimizer state once, in the precision of the run, for any layout.",
        load_from_fp32_weights=BOOL,
        elastic_checkpoint=BOOL,
        pipeline_loading_checkpoint=BOOL,
    ),
    *_OFFLOAD_PARAMETERS,
    *_OFFLOAD_OPTIMIZER,
    Key("cpu_offload", BOOL, MAPPED, "strategy.offload=optimizer", "The old form of offload_optimizer."),
    Key("cpu_offload_param", BOOL, MAPPED, "strategy.offload=parameters", "The old form of offload_param."),
    Key(
        "cpu_offload_params",
        BOOL,
        MAPPED,
        "strategy.offload=parameters",
        "The oldest form of offload_param.",
    ),
    Key("cpu_offload_use_pin_memory", BOOL, APPROXIMATED, "", "Host memory is pinned where there is a GPU."),
    *_STAGE_3,
    *alike(
        APPROXIMATED,
        "Counted in blocks: FSDP2 gathers the next one ahead; strategy.prefetch says how many.",
        prefetch_bucket_size=WHOLE,
    ),
    Key(
        "stage3_prefetch_bucket_size",
        WHOLE,
        APPROXIMATED,
        "",
        "Counted in blocks: FSDP2 gathers the next one ahead; strategy.prefetch says how many.",
        auto=_CHOSEN,
    ),
    Key(
        "stage3_param_persistence_threshold",
        WHOLE,
        APPROXIMATED,
        "",
        "All parameters are sharded; small ones are gathered with their block.",
        auto=_CHOSEN,
    ),
    *alike(
        APPROXIMATED,
        "All parameters are sharded; small ones are gathered with their block.",
        stage3_model_persistence_threshold=WHOLE,
        param_persistence_threshold=WHOLE,
        model_persistence_threshold=WHOLE,
    ),
    *(
        Key(
            name,
            BOOL,
            APPROXIMATED,
            "",
            "trainwright checkpoint export --format hf --dtype bfloat16 writes whole weights of any checkpoint.",
            harmless=(False,),
            auto="nothing: export serves any checkpoint",
        )
        for name in (
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
        )
    ),
    Key(
        "ignore_unused_parameters",
        BOOL,
        MAPPED,
        "strategy.find_unused_parameters",
        "Stages 1 and 2 (and 0); stage 3 takes a parameter without gradient as it is.",
    ),
    *alike(
        APPROXIMATED,
        "Each rank steps its rows of each parameter.",
        legacy_stage1=BOOL,
        round_robin_gradients=BOOL,
        parameter_alignment=BOOL,
        grad_hooks=BOOL,
        log_trace_cache_warnings=BOOL,
        enable_sanity_checks=BOOL,
    ),
    Key(
        "zero_hpz_partition_size",
        WHOLE,
        UNSUPPORTED,
        "",
        "There is no second copy of parameters within a machine; strategy.shard=<ranks of one> strategy.replicate=-1 "
        "keeps gathering within it.",
        harmless=(0, 1),
    ),
    *(
        Key(
            name,
            BOOL,
            APPROXIMATED,
            "",
            "Sent in full precision: nothing is lost, and more is sent. compression=int8 serves strategy.replicate.",
            harmless=(False,),
        )
        for name in ("zero_quantized_weights", "zero_quantized_gradients")
    ),
    Key(
        "zero_quantized_nontrainable_weights",
        BOOL,
        UNSUPPORTED,
        "",
        "Frozen weights keep their precision and take more memory.",
        harmless=(False,),
    ),
    *within(
        "zeropp_loco_param",
        *alike(
            APPROXIMATED,
            "Gradients are sent in full precision, so there is no error to feed back.",
            err_beta=NUMBER,
            reset_T=WHOLE,
        ),
    ),
    Key(
        "mics_shard_size",
        WHOLE,
        MAPPED,
        "strategy.shard, strategy.replicate=-1",
        "Groups of so many ranks share one copy of the state.",
        harmless=(-1, 0),
    ),
    Key(
        "mics_hierarchical_params_gather",
        BOOL,
        APPROXIMATED,
        "",
        "Parameters are gathered in one collective.",
        harmless=(False,),
    ),
    Key(
        "save_muon_momentum_buffer_in_memory",
        BOOL,
        UNSUPPORTED,
        "",
        "Of Muon on NVMe; state lives in device or host memory.",
        harmless=(False,),
    ),
    *within(
        "leaf_module",
        *alike(
            APPROXIMATED,
            "strategy.blocks names what is gathered as one unit, as patterns of module names.",
            classes="any",
            names="any",
            name_suffixes="any",
        ),
    ),
    *within(
        "zenflow",
        *alike(
            APPROXIMATED,
            "Every gradient is applied in its own step, with strategy.offload=optimizer.",
            "strategy.offload=optimizer",
            topk_ratio=NUMBER,
            select_strategy=TEXT,
            select_interval="any",
            update_interval="any",
            overlap_step=BOOL,
            offload=BOOL,
            auto_ratio=NUMBER,
            full_warm_up_rounds=WHOLE,
            pt_reserved_cores_perc=NUMBER,
            steps_per_epoch=WHOLE,
        ),
    ),
)

AIO = within(
    "aio",
    *alike(
        UNSUPPORTED,
        _IO,
        block_size=WHOLE,
        queue_depth=WHOLE,
        thread_count=WHOLE,
        intra_op_parallelism=WHOLE,
        single_submit=BOOL,
        overlap_events=BOOL,
        use_gds=BOOL,
    ),
)

ACTIVATIONS = within(
    "activation_checkpointing",
    Key(
        "partition_activations",
        BOOL,
        APPROXIMATED,
        "strategy.activation_checkpointing=full",
        "Every block is recomputed; with strategy.sequence_parallel=true tensor ranks keep a part of what is between.",
        harmless=(False,),
    ),
    Key(
        "cpu_checkpointing",
        BOOL,
        APPROXIMATED,
        "strategy.activation_checkpointing=full",
        "Every block is recomputed; its inputs stay on the device.",
        harmless=(False,),
    ),
    Key(
        "contiguous_memory_optimization",
        BOOL,
        APPROXIMATED,
        "",
        "torch's allocator holds the inputs of blocks.",
        harmless=(False,),
    ),
    Key(
        "number_checkpoints",
        WHOLE,
        APPROXIMATED,
        "strategy.activation_checkpointing=full",
        "Every block is recomputed; activation_checkpointing=selective recomputes what checkpoint_modules names.",
        harmless=(0,),
    ),
    *(
        Key(
            name,
            BOOL,
            UNSUPPORTED,
            "",
            "trainer.profiler=simple times the hooks of a step.",
            harmless=(False,),
        )
        for name in ("synchronize_checkpoint_boundary", "profile")
    ),
    Key(
        "use_reentrant",
        BOOL,
        APPROXIMATED,
        "",
        "torch's checkpointing without re-entering runs, with the same result.",
    ),
)

CHECKPOINT = (
    *within(
        "checkpoint",
        Key(
            "tag_validation",
            TEXT,
            MAPPED,
            "",
            "All ranks write one checkpoint, which is published at once.",
            words=("Ignore", "Warn", "Fail", "ignore", "warn", "fail", "IGNORE", "WARN", "FAIL"),
        ),
        Key("load_universal", BOOL, MAPPED, "", "Any checkpoint goes on under any layout."),
        Key(
            "use_node_local_storage",
            BOOL,
            UNSUPPORTED,
            "",
            "All ranks must see the folder of checkpoints; a store (s3://...) serves machines without shared files.",
            harmless=(False,),
            auto="nothing: a shared folder",
        ),
        *within(
            "parallel_write",
            Key("pipeline_stage", BOOL, MAPPED, "", "Every rank writes what it holds."),
        ),
        Key(
            "checkpoint_serialization",
            BOOL,
            APPROXIMATED,
            "",
            "Tensors are written as safetensors, everything else as JSON.",
        ),
        *within(
            "writer",
            Key(
                "decoupled",
                BOOL,
                MAPPED,
                "checkpoint=async",
                "Checkpoints are written beside training.",
                harmless=(False,),
            ),
            *alike(
                APPROXIMATED,
                "safetensors files are written through the file system, or to a store.",
                type=TEXT,
                io_buffer_size=WHOLE,
                io_buffer_double=BOOL,
                io_multiplier=NUMBER,
                show_statistics=BOOL,
                data_parallel=TEXT,
            ),
        ),
    ),
    *within(
        "nebula",
        Key("enabled", BOOL, APPROXIMATED, "checkpoint=async", "Checkpoints are written beside training."),
        *alike(
            APPROXIMATED,
            "The group checkpoint says where, how often and how many: checkpoint.<name>.dirpath, every_n_train_steps, "
            "save_top_k; ckpt_path= and resume=auto load.",
            persistent_storage_path=TEXT,
            persistent_time_interval=NUMBER,
            num_of_version_in_retention=WHOLE,
            enable_nebula_load=BOOL,
            load_path=TEXT,
        ),
        switch="enabled",
    ),
    Key(
        "datastates_ckpt",
        MAPPING,
        APPROXIMATED,
        "checkpoint=async",
        "Checkpoints are written beside training; the sizes of its caches have no counterpart.",
    ),
)

KEYS = (
    *ZERO,
    Key("zero_optimization", BOOL, MAPPED, "strategy=zero1|ddp", "The old form: true is stage 1, false is stage 0."),
    Key(
        "allgather_size",
        WHOLE,
        APPROXIMATED,
        "",
        "The old form of zero_optimization.allgather_bucket_size.",
    ),
    *AIO,
    *ACTIVATIONS,
    *CHECKPOINT,
)
