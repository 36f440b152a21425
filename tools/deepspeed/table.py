"""All keys of DeepSpeed's configuration: those that are mapped or stop a run, and the names of all others.

They follow DeepSpeed's documentation, "DeepSpeed Configuration JSON", and the models with which DeepSpeed 0.19 reads a
file. Keys that later versions dropped are kept, since files have them. docs/deepspeed.md says what each one becomes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from trainwright.tools.deepspeed.key import (
    ANY,
    APPROXIMATED,
    BOOL,
    LIST,
    MAPPING,
    NUMBER,
    RATES,
    TEXT,
    WHOLE,
    Key,
    alike,
    stop,
)

Tree = dict[str, "Tree"]
_DEVICES = ("none", "cpu", "nvme")
_DTYPES = ("bfloat16", "bf16", "torch.bfloat16", "float16", "fp16", "half", "torch.float16")
_MIXED = "DeepSpeed's weights have 16 bits beside float32 copies; here weights and gradients are float32 (autocast)."
_RECOMPUTED = "Every block is recomputed; its inputs stay on the device."
_ASYNC = ("checkpoint", "async")
_FULL = ("strategy.activation_checkpointing", "full")

_TRAINING = (
    *alike(
        "", WHOLE, "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps", auto=True, least=1
    ),
    Key("gradient_clipping", NUMBER, auto=True, least=0),
    Key("optimizer.type", TEXT),
    *alike("optimizer.params", NUMBER, "lr weight_decay momentum", auto=True),
    Key("optimizer.params.betas", LIST, auto=True),
    Key("optimizer.params.eps", RATES, auto=True),
    *alike("optimizer.params", NUMBER, "dampening alpha lambd t0 rho lr_decay initial_accumulator_value"),
    *alike("optimizer.params", NUMBER, "momentum_decay beta2_decay d"),
    *alike("optimizer.params", BOOL, "nesterov centered amsgrad maximize decoupled_weight_decay"),
    *alike("optimizer.params", BOOL, "torch_adam adam_w_mode"),
    Key("optimizer.params.freeze_step", WHOLE),
    Key("optimizer.params.var_freeze_step", WHOLE, status=APPROXIMATED),
    Key("optimizer.params.max_grad_norm", NUMBER, status=APPROXIMATED),
    stop(
        "optimizer.params.bias_correction", "torch's Adam always corrects its averages; take the key out.", BOOL, True
    ),
    Key("scheduler.type", TEXT),
    Key("scheduler.params.warmup_min_lr", RATES, "lowest", auto=True),
    Key("scheduler.params.warmup_max_lr", RATES, "highest", auto=True),
    Key("scheduler.params.warmup_num_steps", WHOLE, "warmup_steps", auto=True),
    Key("scheduler.params.warmup_type", TEXT, "shape", words=("log", "linear")),
    Key("scheduler.params.total_num_steps", WHOLE, "total_steps", auto=True),
    Key("scheduler.params.warmup_min_ratio", NUMBER, "first_part"),
    Key("scheduler.params.cos_min_ratio", NUMBER, "last_part"),
    Key("scheduler.params.lr_range_test_min_lr", RATES, "lowest"),
    Key("scheduler.params.lr_range_test_step_size", WHOLE, "every"),
    Key("scheduler.params.lr_range_test_step_rate", NUMBER, "growth"),
    Key("scheduler.params.lr_range_test_staircase", BOOL, "staircase"),
    Key("scheduler.params.cycle_min_lr", RATES, "lowest"),
    Key("scheduler.params.cycle_max_lr", RATES, "highest"),
    Key("scheduler.params.decay_lr_rate", NUMBER, "decay"),
    Key("scheduler.params.cycle_first_step_size", NUMBER, "up_steps"),
    Key("scheduler.params.cycle_second_step_size", NUMBER, "down_steps"),
    Key("scheduler.params.cycle_first_stair_count", WHOLE, "up_stairs"),
    Key("scheduler.params.cycle_second_stair_count", WHOLE, "down_stairs"),
    Key("scheduler.params.decay_step_size", NUMBER, "decay_every"),
    Key("scheduler.params.cycle_momentum", BOOL, "cycle_momentum"),
    Key("scheduler.params.cycle_min_mom", RATES, "lowest_momentum"),
    Key("scheduler.params.cycle_max_mom", RATES, "highest_momentum"),
    Key("scheduler.params.decay_mom_rate", NUMBER, "momentum_decay"),
)

_PRECISION = (
    *(
        Key(f"{mode}.enabled", BOOL, note=_MIXED, status=APPROXIMATED, auto=True)
        for mode in ("fp16", "bf16", "bfloat16")
    ),
    *alike("fp16", NUMBER, "loss_scale min_loss_scale"),
    Key("fp16.initial_scale_power", WHOLE),
    Key("fp16.loss_scale_window", WHOLE, least=1),
    *alike("bf16", BOOL, "bf16_master_weights_and_grads bf16_optimizer_states"),
    *alike("bfloat16", BOOL, "bf16_master_weights_and_grads bf16_optimizer_states"),
    Key("torch_autocast.enabled", BOOL),
    Key("torch_autocast.dtype", TEXT, words=_DTYPES),
    Key("amp.enabled", BOOL, note="torch's autocast in place of Apex.", status=APPROXIMATED, auto=True),
    Key(
        "amp.opt_level",
        TEXT,
        note="O0: precision=32. O1, O2: 16-mixed. O3, pure float16, is not supported: 16-mixed.",
        status=APPROXIMATED,
        words=("O0", "O1", "O2", "O3"),
        auto=True,
    ),
    Key("amp.loss_scale", ANY, status=APPROXIMATED),
    Key("communication_data_type", TEXT, words=("fp32", "fp16", "bf16")),
    Key("fp32_allreduce", BOOL, note="Gradients are averaged in float32 with compression=none."),
    stop(
        "gradient_allreduce_op",
        "Gradients are averaged, never summed. With plain SGD, multiply the learning rate by the data ranks.",
        TEXT,
        "mean",
        ("mean", "sum"),
    ),
)

_LAYOUT = (
    Key("zero_optimization", BOOL),
    Key("zero_optimization.stage", WHOLE, words=(0, 1, 2, 3)),
    Key("zero_optimization.reduce_bucket_size", WHOLE, auto=True, least=1),
    Key("zero_optimization.mics_shard_size", WHOLE),
    *alike("zero_optimization", TEXT, "offload_param.device offload_optimizer.device", words=_DEVICES),
    *alike("zero_optimization", BOOL, "cpu_offload cpu_offload_param cpu_offload_params ignore_unused_parameters"),
    *alike(
        "zero_optimization.zenflow",
        ANY,
        "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
        "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch",
        status=APPROXIMATED,
    ),
    *alike(
        "activation_checkpointing",
        BOOL,
        "partition_activations cpu_checkpointing",
        note=_RECOMPUTED,
        status=APPROXIMATED,
        sets=_FULL,
    ),
    Key("activation_checkpointing.number_checkpoints", WHOLE, note=_RECOMPUTED, status=APPROXIMATED, sets=_FULL),
    Key("pipeline.stages", WHOLE, auto=True, least=0),
    Key("pipeline.partition", TEXT),
    Key(
        "pipeline.activation_checkpoint_interval",
        WHOLE,
        note="Every block is recomputed by itself, which is exact for 1.",
        status=APPROXIMATED,
    ),
    *alike("tensor_parallel", WHOLE, "autotp_size tp.tp_size tensor_parallel.tp_size", least=0),
    Key("tensor_parallel.vocab_parallel_lm_head", BOOL),
    Key("sequence_parallel_size", WHOLE, least=0),
    Key("expert_parallel.enabled", BOOL),
    Key("expert_parallel.autoep_size", WHOLE, least=0),
    Key(
        "compile.deepcompile",
        BOOL,
        note="Block by block with torch.compile; the strategy's collectives stay outside.",
        status=APPROXIMATED,
        sets=("strategy.compile", True),
    ),
    Key("compile.enabled", BOOL, sets=("strategy.compile", True)),
)

_WATCHING = (
    Key("checkpoint.writer.decoupled", BOOL, sets=_ASYNC),
    Key("nebula.enabled", BOOL, status=APPROXIMATED, sets=_ASYNC),
    Key("datastates_ckpt", MAPPING, status=APPROXIMATED, sets=_ASYNC),
    Key("steps_per_print", WHOLE, least=1, note="Optimizer steps between two logged rows.", status=APPROXIMATED),
    Key(
        "comms_logger.enabled",
        BOOL,
        note="Bytes by mesh axis and kind of collective, not times.",
        status=APPROXIMATED,
        sets=("monitor", "communication"),
    ),
    Key("wall_clock_breakdown", BOOL, note="monitor.step_time logs time/<part>. On in monitor=default."),
    Key("memory_breakdown", BOOL, note="monitor.memory logs memory/<name>. On in monitor=default."),
    Key("timers.throughput.enabled", BOOL, note="monitor.throughput. On in monitor=default."),
    Key(
        "flops_profiler.enabled",
        BOOL,
        note="monitor.throughput logs flops_per_second of the whole module. On in monitor=default.",
        status=APPROXIMATED,
    ),
    Key("csv_monitor.enabled", BOOL, note="metrics.csv in the run directory is always written."),
    Key("tensorboard.enabled", BOOL),
    Key("tensorboard.output_path", TEXT, "save_dir"),
    Key("tensorboard.job_name", TEXT, "name"),
    Key("wandb.enabled", BOOL),
    Key("wandb.project", TEXT, "project"),
    Key("wandb.team", TEXT, "entity"),
    Key("wandb.group", TEXT, "group"),
    Key("comet.enabled", BOOL),
    Key("comet.project", TEXT, "project"),
    Key("comet.workspace", TEXT, "workspace"),
    Key("comet.experiment_key", TEXT, "experiment_key"),
    Key("comet.online", BOOL, "online"),
    Key("comet.mode", TEXT, "mode"),
)

_OUT = "Take the section out of the file to train without it."
_PRUNINGS = ("sparse_pruning", "row_pruning", "head_pruning", "channel_pruning")
_TECHNIQUES = ("weight_quantization", "activation_quantization", *_PRUNINGS)
_COMPRESSED = f"Quantize and prune with a library in the module. {_OUT}"
_SAMPLES = f"The data module decides the order and length of samples. {_OUT}"
_STOPS = (
    stop("curriculum_learning.enabled", _SAMPLES),
    stop("data_efficiency.enabled", _SAMPLES),
    stop("progressive_layer_drop.enabled", f"The module decides which layers it computes. {_OUT}"),
    *(stop(f"compression_training.{name}.shared_parameters.enabled", _COMPRESSED) for name in _TECHNIQUES),
    stop("compression_training.layer_reduction.enabled", _COMPRESSED),
    stop("quantize_training.enabled", _COMPRESSED),
    stop("eigenvalue.enabled", _COMPRESSED),
    stop("weight_quantization.quantized_initialization", _COMPRESSED, MAPPING, {}),
    stop("weight_quantization.post_init_quant", _COMPRESSED, MAPPING, {}),
    stop("sparse_attention.mode", f"Attention is the model's own. {_OUT}", TEXT, "dense"),
    stop("elasticity.enabled", f"A run resumes with any number of ranks (launch.min_devices). {_OUT}"),
)

KEYS = {key.path: key for key in (*_TRAINING, *_PRECISION, *_LAYOUT, *_WATCHING, *_STOPS)}
# Sections whose mapped keys have an effect only where their `enabled` is true.
SWITCHED = ("fp16", "bf16", "bfloat16", "torch_autocast", "amp", "expert_parallel", "tensorboard", "wandb", "comet")

# Keys that have no effect here, after their sections. A star stands for a name that the user chooses.
_NO_EFFECT = """
: managed_gradient_accumulation dataloader_drop_last vocabulary_size zero_allow_untested_optimizer
  zero_force_ds_cpu_optimizer seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor
  sparse_gradients disable_allgather allgather_size use_data_before_expert_parallelism dump_state log_level
  disable_python_gc
optimizer: legacy_fusion
optimizer.params: foreach fused capturable differentiable set_grad_none fp32_optimizer_states cuda_aware
  comm_backend_name var_update_scaler local_step_scaler local_step_clipper max_coeff min_coeff coeff_beta factor_max
  factor_min factor_threshold eps_inside_sqrt muon_lr adam_lr ns_method ns_steps per_head_muon
scheduler.params: last_batch_iteration
fp16: hysteresis consecutive_hysteresis auto_cast opt_level fp16_master_weights_and_grads
bf16: immediate_grad_update check_grad_overflow check_overflow
bfloat16: immediate_grad_update check_grad_overflow check_overflow
torch_autocast: lower_precision_safe_modules
amp: cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights cast_model_outputs num_losses verbosity
  min_loss_scale max_loss_scale
data_types: grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules
zero_optimization: contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions
  allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint
  pipeline_loading_checkpoint cpu_offload_use_pin_memory stage3_max_live_parameters stage3_max_reuse_distance
  stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
  max_live_parameters max_reuse_distance module_granularity_threshold use_all_reduce_for_fetch_params
  allgather_sequential sub_group_size memory_efficient_linear override_module_apply prefetch_bucket_size
  stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
  param_persistence_threshold model_persistence_threshold stage3_gather_16bit_weights_on_model_save
  stage3_gather_fp16_weights_on_model_save gather_16bit_weights_on_model_save legacy_stage1 round_robin_gradients
  parameter_alignment grad_hooks log_trace_cache_warnings enable_sanity_checks zero_hpz_partition_size
  zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights mics_hierarchical_params_gather
  save_muon_momentum_buffer_in_memory
zero_optimization.offload_param: nvme_path buffer_count buffer_size max_in_cpu pin_memory
zero_optimization.offload_optimizer: nvme_path buffer_count fast_init pipeline_read pipeline_write pipeline pin_memory
  ratio super_offload cpuadam_cores_perc
zero_optimization.zeropp_loco_param: err_beta reset_T
zero_optimization.leaf_module: classes names name_suffixes
aio: block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds
activation_checkpointing: contiguous_memory_optimization synchronize_checkpoint_boundary profile use_reentrant
checkpoint: tag_validation load_universal use_node_local_storage checkpoint_serialization
checkpoint.parallel_write: pipeline_stage
checkpoint.writer: type io_buffer_size io_buffer_double io_multiplier show_statistics data_parallel
nebula: persistent_storage_path persistent_time_interval num_of_version_in_retention enable_nebula_load load_path
pipeline: seed_layers pipe_partitioned grad_partitioned use_reentrant
tensor_parallel.tp: tp_grain_size mpu tp_group
tensor_parallel.tensor_parallel: tp_grain_size
tensor_parallel: preset_model tp_overlap_comm vocab_parallel_ce_backend dtype injection_policy_tuple
  keep_module_on_host replace_with_kernel_inject kernel_inject
tensor_parallel.partition_config: use_default_specs layer_specs tp_size embedding_partition_dim lm_head_patterns
  strict_mode
expert_parallel: expert_tensor_parallel_size preset_model moe_layer_pattern expert_pattern router_pattern expert_w1
  expert_w2 expert_w3 num_experts_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern score_func
  score_apply route_norm route_scale top_k top_k_attr routed_scaling_factor num_expert_groups num_limited_groups
  load_balance_coeff expert_activation use_grouped_mm disable_triton_grouped_mm combine_impl row_weighting_impl
  gate_up_impl async_split_plan validate_folding_routing comm_backend comm_num_sm comm_qp_margin
  comm_max_tokens_per_rank
compile: passes autoep_non_moe free_activation free_activation_threshold offload_activation
  offload_activation_pin_memory offload_opt_states offload_parameters double_buffer symmetric_memory debug_log
  sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors
  keep_all_input_tensors backend kwargs
graph_harvesting: enabled
hybrid_engine: enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size
  enable_cuda_graph
timers.throughput: synchronized
csv_monitor: output_path job_name
comet: api_key samples_log_interval experiment_name
comms_logger: verbose prof_all debug prof_ops
flops_profiler: recompute_fwd_factor profile_step module_depth top_modules detailed output_file
autotuning: enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path
  tuner_type tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size min_train_batch_size
  max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size
  model_info_path
autotuning.model_info: profile num_params hidden_size num_layers
curriculum_learning: curriculum_type min_difficulty max_difficulty schedule_type
curriculum_learning.schedule_config: total_curriculum_step difficulty_step root_degree difficulty max_step
data_efficiency: seed
data_efficiency.data_sampling: enabled num_epochs num_workers pin_memory
data_efficiency.data_sampling.curriculum_learning: enabled data_cluster_path
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*: index_to_sample_path index_to_metric_path
  difficulty_type clustering_type min_difficulty max_difficulty schedule_type
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config: total_curriculum_step
  difficulty_step root_degree difficulty max_step
data_efficiency.data_sampling.dynamic_batching: enabled metrics_path lr_scaling_method min_batch_size max_batch_size
  sequence_picking_order max_tokens verbose
data_efficiency.data_routing: enabled
data_efficiency.data_routing.random_ltd: enabled total_layer_num random_ltd_layer_num random_ltd_layer_id
  model_mask_name model_type hidden_state_order micro_batch_size global_batch_size
data_efficiency.data_routing.random_ltd.random_ltd_schedule: min_value max_value schedule_type
data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config: require_steps seq_per_step
data_efficiency.data_routing.random_ltd.layer_token_lr_schedule: enabled total_layer_tokens warmup_type
  warmup_layer_tokens
progressive_layer_drop: theta gamma
compression_training.<technique>.shared_parameters: schedule_offset schedule_offset_end quantizer_kernel
  quantize_groups quantize_verbose quantization_type rounding quantize_weight_in_forward range_calibration method
  num_heads schedule_offset_stride block_pattern dense_ratio excluded_modules
compression_training.<technique>.shared_parameters.fp16_mixed_quantize: enabled quantize_change_ratio
compression_training.<technique>.different_groups.*: modules related_modules
compression_training.<technique>.different_groups.*.params: start_bits target_bits quantization_period bits dense_ratio
compression_training.layer_reduction: keep_number_layer module_name_prefix teacher_layer other_module_name
quantize_training: quantize_verbose quantizer_kernel quantize_type quantize_groups quantize_weight_in_forward rounding
quantize_training.quantize_bits: start_bits target_bits
quantize_training.quantize_schedule: quantize_period schedule_offset
quantize_training.quantize_algo: q_type rounding
quantize_training.fp16_mixed_quantize: enabled quantize_change_ratio
eigenvalue: verbose max_iter tol stability gas_boundary_resolution layer_name layer_num
weight_quantization: enabled q_type q_groups
sparse_attention: block different_layout_per_head num_local_blocks num_global_blocks attention
  horizontal_global_attention num_different_global_patterns num_random_blocks local_window_blocks global_block_indices
  global_block_end_indices num_sliding_window_blocks
elasticity: max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time version prefer_larger_batch
  prefer_large_batch ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size
"""


def _tree() -> Tree:
    paths, sections = list(KEYS), [""]
    for word in _NO_EFFECT.split():
        if word.endswith(":"):
            sections = [word.replace(":", ".").replace("<technique>", name) for name in _TECHNIQUES]
        else:
            paths += [f"{section}{word}".lstrip(".") for section in sections]
    root: Tree = {}
    for path in paths:
        node = root
        for part in path.split("."):
            node = node.setdefault(part, {})
    return root


# Every name that a file may have, section within section; a key without keys of its own is an empty section.
TREE = _tree()


def elsewhere(name: str) -> list[str]:
    """Return paths of keys and sections, anywhere in the file, that have this name or one close to it."""
    by_name: dict[str, list[str]] = {}
    for path in _paths(TREE):
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.75)
    return by_name[near[0]] if near else []


def _paths(tree: Tree, above: str = "") -> Iterator[str]:
    for name, section in tree.items():
        if name != "*":
            yield f"{above}{name}"
            yield from _paths(section, f"{above}{name}.")
