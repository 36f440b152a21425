"""Keys of logging, monitors, profilers, tuning and the process."""

from trainwright.tools.deepspeed.key import (
    APPROXIMATED,
    BOOL,
    LIST,
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

LOGGING = (
    Key(
        "steps_per_print",
        WHOLE,
        APPROXIMATED,
        "trainer.log_every_n_steps",
        "Optimizer steps between two logged rows; the progress bar shows the latest.",
    ),
    Key(
        "wall_clock_breakdown",
        BOOL,
        MAPPED,
        "monitor.step_time",
        "Seconds of a step by part are logged as time/<part>; on in monitor=default.",
        harmless=(False,),
    ),
    Key(
        "memory_breakdown",
        BOOL,
        MAPPED,
        "monitor.memory",
        "Bytes are logged as memory/<name>; on in monitor=default.",
        harmless=(False,),
    ),
    Key(
        "dump_state",
        BOOL,
        APPROXIMATED,
        "",
        "config.yaml in the run directory is the whole configuration; a summary is printed at the start.",
        harmless=(False,),
    ),
    Key("log_level", TEXT, UNSUPPORTED, "", "Everything is in logs/rank_<n>.log of the run directory."),
    Key(
        "disable_python_gc",
        BOOL,
        UNSUPPORTED,
        "",
        "Call gc.disable() in the module where it helps.",
        harmless=(False,),
    ),
    *within(
        "timers",
        *within(
            "throughput",
            Key("enabled", BOOL, MAPPED, "monitor.throughput", "On in monitor=default."),
            Key(
                "synchronized",
                BOOL,
                APPROXIMATED,
                "",
                "Windows of steps are timed, without waiting for the device at each.",
            ),
        ),
    ),
)

MONITORS = (
    *within(
        "tensorboard",
        Key("enabled", BOOL, MAPPED, "logger=default", "Event files; logger=csv leaves them out."),
        Key("output_path", TEXT, MAPPED, "logger.tensorboard.save_dir"),
        Key("job_name", TEXT, MAPPED, "logger.tensorboard.name"),
        switch="enabled",
    ),
    *within(
        "csv_monitor",
        Key("enabled", BOOL, MAPPED, "logger", "metrics.csv in the run directory is always written."),
        *alike(
            APPROXIMATED,
            "metrics.csv lies in the run directory: run_dir= says which.",
            output_path=TEXT,
            job_name=TEXT,
        ),
        switch="enabled",
    ),
    *within(
        "wandb",
        Key(
            "enabled",
            BOOL,
            MAPPED,
            "logger.wandb",
            "Lightning's WandbLogger, where the package wandb is installed.",
        ),
        Key("project", TEXT, MAPPED, "logger.wandb.project"),
        Key("team", TEXT, MAPPED, "logger.wandb.entity"),
        Key("group", TEXT, MAPPED, "logger.wandb.group"),
        switch="enabled",
    ),
    *within(
        "comet",
        Key(
            "enabled",
            BOOL,
            MAPPED,
            "logger.comet",
            "Lightning's CometLogger, where the package comet_ml is installed.",
        ),
        Key("project", TEXT, MAPPED, "logger.comet.project"),
        Key("workspace", TEXT, MAPPED, "logger.comet.workspace"),
        Key("experiment_key", TEXT, MAPPED, "logger.comet.experiment_key"),
        Key("online", BOOL, MAPPED, "logger.comet.online"),
        Key("mode", TEXT, MAPPED, "logger.comet.mode"),
        Key(
            "api_key",
            TEXT,
            UNSUPPORTED,
            "",
            "A secret does not belong into a configuration that a run writes down; set COMET_API_KEY.",
            secret=True,
        ),
        *alike(
            UNSUPPORTED,
            "Set it in Comet's own configuration, ~/.comet.config.",
            samples_log_interval=WHOLE,
            experiment_name=TEXT,
        ),
        switch="enabled",
    ),
    *within(
        "comms_logger",
        Key(
            "enabled",
            BOOL,
            APPROXIMATED,
            "monitor=communication",
            "Bytes by mesh axis and kind of collective, not times.",
        ),
        *alike(
            APPROXIMATED,
            "All collectives are counted, by axis and kind.",
            verbose=BOOL,
            prof_all=BOOL,
            debug=BOOL,
            prof_ops=LIST,
        ),
        switch="enabled",
    ),
)

PROFILERS = (
    *within(
        "flops_profiler",
        Key(
            "enabled",
            BOOL,
            APPROXIMATED,
            "monitor.throughput",
            "flops_per_second is logged, for the whole module; on in monitor=default. With "
            "monitor.throughput.peak_flops mfu is logged too.",
        ),
        *alike(
            UNSUPPORTED,
            "Operations are counted once for the whole module; trainer.profiler=pytorch records each.",
            recompute_fwd_factor=NUMBER,
            profile_step=WHOLE,
            module_depth=WHOLE,
            top_modules=WHOLE,
            detailed=BOOL,
            output_file=TEXT,
        ),
        switch="enabled",
    ),
    *within(
        "autotuning",
        Key(
            "enabled",
            BOOL,
            UNSUPPORTED,
            "",
            "Nothing is tuned by trial runs: trainwright plan ranks all layouts by prediction, strategy=auto trains "
            "with the best of them, micro_batch_size=auto with the largest micro-batch that fits; trainwright fit "
            "-m runs combinations.",
            harmless=(False,),
        ),
        *alike(
            UNSUPPORTED,
            "Of trial runs that are not made; trainwright plan predicts instead.",
            fast=BOOL,
            results_dir=TEXT,
            exps_dir=TEXT,
            overwrite=BOOL,
            start_profile_step=WHOLE,
            end_profile_step=WHOLE,
            metric=TEXT,
            metric_path=TEXT,
            tuner_type=TEXT,
            tuner_early_stopping=WHOLE,
            tuner_num_trials=WHOLE,
            arg_mappings=MAPPING,
            max_train_batch_size=WHOLE,
            min_train_batch_size=WHOLE,
            max_train_micro_batch_size_per_gpu=WHOLE,
            min_train_micro_batch_size_per_gpu=WHOLE,
            num_tuning_micro_batch_sizes=WHOLE,
            mp_size=WHOLE,
            model_info_path=TEXT,
        ),
        *within(
            "model_info",
            *alike(
                UNSUPPORTED,
                "Of trial runs that are not made; trainwright plan looks at the module itself.",
                profile=BOOL,
                num_params=WHOLE,
                hidden_size=WHOLE,
                num_layers=WHOLE,
            ),
        ),
        switch="enabled",
    ),
)

KEYS = (*LOGGING, *MONITORS, *PROFILERS)
