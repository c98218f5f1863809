"""The tests behind the table of what works with what, in docs/compatibility.md.

For each row, in the order of the columns: the tests of a cell that says "yes", or what else it
says. A name in brackets is one that the test is parametrized with.
"""

STRATEGY = "distributed/test_"
HOROVOD = "horovod/test_"
KERAS2 = "keras2/test_"
AS_ONE_PROCESS = "training.py::test_dense_training_equals_one_process_on_whole_batches"

COLUMNS = (
    "Keras 3, strategy",
    "Keras 3, Horovod",
    "Keras 2, strategy",
    "Keras 2, Horovod",
)
NOT_THERE = "-"
NOT_TESTED = "not tested"

ROWS = {
    "`fit`": (
        [f"{STRATEGY}fit.py::test_weights_and_slots_are_bit_equal_on_all_workers"],
        [f"{HOROVOD}{AS_ONE_PROCESS}[AdamW]"],
        [f"{KERAS2}{AS_ONE_PROCESS}[wrapped]"],
        [f"{KERAS2}{AS_ONE_PROCESS}[ranks]"],
    ),
    "`evaluate`, `predict` over the data of all workers": (
        [
            f"{STRATEGY}fit.py::test_evaluate_covers_the_data_of_all_workers",
            f"{STRATEGY}fit.py::test_predict_returns_all_rows_in_order_on_every_worker",
        ],
        NOT_THERE,
        [f"{KERAS2}metrics.py::test_metrics_and_predictions_equal_one_process"],
        NOT_THERE,
    ),
    "`EarlyStopping`": (
        [f"{STRATEGY}fit.py::test_early_stopping_stops_all_workers_at_once"],
        NOT_THERE,
        NOT_TESTED,
        NOT_THERE,
    ),
    "`class_weight`, `sample_weight`": (
        [
            f"{STRATEGY}optimizer_features.py::test_two_workers_train_as_one_process_with[{case}]"
            for case in ("momentum, schedule and class_weight", "AdamW and sample_weight")
        ],
        NOT_TESTED,
        NOT_TESTED,
        NOT_TESTED,
    ),
    "`steps_per_execution`": (
        [f"{STRATEGY}fit.py::test_steps_per_execution_changes_nothing"],
        [f"{HOROVOD}fit.py::test_steps_in_one_execution_equal_separate_steps"],
        NOT_TESTED,
        NOT_TESTED,
    ),
    "a training loop": (
        [f"{STRATEGY}training_loops.py::test_training_loop_trains_as_one_process"],
        [f"{HOROVOD}methods.py::test_ranks_stay_equal_and_skip_a_step_together"],
        [f"{KERAS2}methods.py::test_workers_stay_equal_and_skip_a_step_together"],
        [f"{KERAS2}methods.py::test_ranks_of_horovod_do_what_workers_of_a_strategy_do"],
    ),
    "a compressor on the strategy": (
        [f"{STRATEGY}fit.py::test_both_ways_to_compress_train_to_the_last_bit_alike"],
        NOT_THERE,
        [f"{KERAS2}methods.py::test_workers_stay_equal_with_a_method_of_the_strategy"],
        NOT_THERE,
    ),
    "three workers": (
        [f"{STRATEGY}fit.py::test_more_workers_have_bit_equal_weights_and_slots"],
        [f"{HOROVOD}methods.py::test_ranks_stay_equal_and_skip_a_step_together[methods_of_three]"],
        [f"{KERAS2}three_workers.py::test_three_train_as_one_process_and_stay_equal"],
        [f"{KERAS2}three_workers.py::test_three_ranks_resume_from_a_job_of_two"],
    ),
    "AdaComp": (
        [f"{STRATEGY}methods.py::test_weights_and_slots_are_bit_equal"],
        [f"{HOROVOD}methods.py::test_a_method_does_what_it_does_by_the_collectives_of_tensorflow"],
        [f"{KERAS2}methods.py::test_workers_stay_equal_and_skip_a_step_together[Adam:adacomp]"],
        [
            f"{KERAS2}methods.py::test_ranks_of_horovod_do_what_workers_of_a_strategy_do[Adam:adacomp]"
        ],
    ),
    "the other methods without callbacks": (
        [f"{STRATEGY}methods.py::test_weights_and_slots_are_bit_equal"],
        [f"{HOROVOD}methods.py::test_a_method_does_what_it_does_by_the_collectives_of_tensorflow"],
        [
            f"{KERAS2}methods.py::test_workers_stay_equal_and_skip_a_step_together[{case}]"
            for case in ("Lookahead:scalecom", "legacy SGD:top_k:scaled", "SGD:power_sgd")
        ],
        [
            f"{KERAS2}methods.py::test_ranks_of_horovod_do_what_workers_of_a_strategy_do[{case}]"
            for case in ("SGD:scalecom", "SGD:power_sgd")
        ],
    ),
    "L-GreCo, LGC": (
        [
            f"{STRATEGY}lgreco.py::test_both_ways_to_train_plan_alike_also_with_several_steps_in_an"
            "_execution",
            f"{STRATEGY}lgc.py::test_all_workers_go_through_all_phases_together",
        ],
        [f"{HOROVOD}methods.py::test_ranks_learn_an_autoencoder_and_plan_together"],
        [f"{KERAS2}callbacks.py::test_callbacks_log_and_a_job_resumes_from_a_backup"],
        [f"{KERAS2}callbacks.py::test_callbacks_do_so_under_horovod"],
    ),
    '`compressor="auto"`': (
        [f"{STRATEGY}auto.py::test_all_workers_choose_the_same_and_train_alike"],
        [f"{HOROVOD}fit.py::test_advice_and_the_choice_are_the_same_on_all_ranks"],
        [f"{KERAS2}three_workers.py::test_three_train_as_one_process_and_stay_equal"],
        NOT_TESTED,
    ),
    "`gc.advise`": (
        [f"{STRATEGY}auto.py::test_all_workers_are_given_the_same_advice"],
        [f"{HOROVOD}fit.py::test_advice_and_the_choice_are_the_same_on_all_ranks"],
        [f"{KERAS2}three_workers.py::test_three_get_advice_and_report_differences"],
        NOT_TESTED,
    ),
    "division by Adam's second moment": (
        [
            f"{STRATEGY}simulation_agrees.py::test_simulation_and_job_agree_step_by_step",
            f"{STRATEGY}auto.py::test_preconditioning_follows_the_choice_and_state_covers_all_candidates",
        ],
        [f"{HOROVOD}saves.py::test_another_job_resumes_from_the_save_of_rank_0"],
        [f"{KERAS2}methods.py::test_workers_stay_equal_and_skip_a_step_together[Adam:adacomp]"],
        [
            f"{KERAS2}methods.py::test_ranks_of_horovod_do_what_workers_of_a_strategy_do[Adam:adacomp]"
        ],
    ),
    "clipping, EMA": (
        [
            f"{STRATEGY}optimizer_features.py::test_clipping_clips",
            f"{STRATEGY}optimizer_features.py::test_two_workers_train_as_one_process_with",
        ],
        [f"{HOROVOD}{AS_ONE_PROCESS}[clipnorm]", f"{HOROVOD}{AS_ONE_PROCESS}[EMA]"],
        [f"{KERAS2}{AS_ONE_PROCESS}[wrapped]"],
        [f"{KERAS2}{AS_ONE_PROCESS}[clipnorm]", f"{KERAS2}{AS_ONE_PROCESS}[EMA]"],
    ),
    "gradient accumulation": (
        [f"{STRATEGY}optimizer_features.py::test_exchanges_on_update_steps_only"],
        [f"{HOROVOD}{AS_ONE_PROCESS}[accumulation]"],
        NOT_THERE,
        NOT_THERE,
    ),
    "`LossScaleOptimizer`, `mixed_float16`": (
        [
            f"{STRATEGY}bad_gradients.py::test_loss_scale_is_halved_on_all_workers",
            f"{STRATEGY}fit.py::test_keras_scales_the_loss_under_mixed_float16",
        ],
        [f"{HOROVOD}fit.py::test_steps_are_skipped_until_the_loss_scale_fits"],
        [
            f"{KERAS2}methods.py::test_workers_stay_equal_and_skip_a_step_together[SGD:adacomp:scaled]"
        ],
        [
            f"{KERAS2}methods.py::test_ranks_of_horovod_do_what_workers_of_a_strategy_do[SGD:adacomp:scaled]"
        ],
    ),
    "all workers skip a step with a NaN": (
        [f"{STRATEGY}methods.py::test_the_bad_step_is_skipped_by_all_and_training_continues"],
        [f"{HOROVOD}methods.py::test_ranks_stay_equal_and_skip_a_step_together"],
        [f"{KERAS2}methods.py::test_workers_stay_equal_and_skip_a_step_together"],
        [f"{KERAS2}methods.py::test_ranks_of_horovod_do_what_workers_of_a_strategy_do"],
    ),
    "`CompressionMonitor`": (
        [f"{STRATEGY}fit.py::test_monitor_counts_all_bytes_of_a_step"],
        [f"{HOROVOD}fit.py::test_plans_and_logs_equal_the_jobs"],
        [f"{KERAS2}callbacks.py::test_callbacks_log_and_a_job_resumes_from_a_backup"],
        [f"{KERAS2}callbacks.py::test_callbacks_do_so_under_horovod"],
    ),
    "checkpoints: Keras' files and `tf.train.Checkpoint`": (
        [f"{STRATEGY}checkpoints.py::test_sum_of_residuals_is_restored_from"],
        [f"{HOROVOD}saves.py::test_another_job_resumes_from_the_save_of_rank_0"],
        [f"{KERAS2}saves.py::test_a_job_resumes_from_its_save"],
        [f"{KERAS2}saves.py::test_ranks_of_horovod_resume_from_a_save"],
    ),
    "`BackupAndRestore`": (
        [f"{STRATEGY}lost_workers.py::test_killed_job_resumes_with"],
        [f"{HOROVOD}fit.py::test_a_backup_holds_the_residuals_of_all"],
        [f"{KERAS2}callbacks.py::test_callbacks_log_and_a_job_resumes_from_a_backup"],
        [f"{KERAS2}callbacks.py::test_callbacks_do_so_under_horovod"],
    ),
    "[several GPUs in each host](clusters.md#several-gpus-in-a-host)": (
        [f"{STRATEGY}two_level.py::test_trains_as_one_replica_in_each_process"],
        NOT_THERE,
        [
            f"{KERAS2}training.py::test_workers_of_several_replicas_train_as_one_process_and_stay_equal"
        ],
        NOT_THERE,
    ),
    "[local steps](local_steps.md)": (
        [
            f"{STRATEGY}local_steps.py::test_workers_average_what_they_learn_in_a_round",
            f"{STRATEGY}local_steps.py::test_fragments_are_exchanged_in_turn",
            f"{STRATEGY}local_fit.py::test_workers_differ_within_rounds_and_agree_after_each_epoch",
        ],
        NOT_THERE,
        NOT_THERE,
        NOT_THERE,
    ),
    "[gossip](gossip.md)": (
        [
            f"{STRATEGY}gossip.py::test_neighbours_on_a_ring_move_by_their_low_rank_difference",
            f"{STRATEGY}gossip.py::test_fit_evaluates_the_mean",
        ],
        NOT_THERE,
        NOT_THERE,
        NOT_THERE,
    ),
    "resuming with another number of workers": (
        [
            f"{STRATEGY}checkpoints.py::test_training_resumes_from",
            f"{STRATEGY}methods.py::test_more_workers_resume_from_a_backup",
        ],
        [f"{HOROVOD}saves.py::test_another_job_resumes_from_the_save_of_rank_0"],
        [f"{KERAS2}three_workers.py::test_three_resume_from_a_job_of_two"],
        [f"{KERAS2}three_workers.py::test_three_ranks_resume_from_a_job_of_two"],
    ),
    "an error when workers differ or die": (
        [
            f"{STRATEGY}mismatch.py::test_every_worker_reports_the_difference_in",
            f"{STRATEGY}lost_workers.py::test_survivor_of_a_killed_worker_ends_with_a_named_error",
        ],
        [
            f"{HOROVOD}mismatch.py::test_ranks_report_their_differences",
            f"{HOROVOD}ends.py::test_the_others_end_with_an_error_when_a_rank_is_killed",
        ],
        [
            f"{KERAS2}three_workers.py::test_three_get_advice_and_report_differences",
            f"{KERAS2}three_workers.py::test_two_end_with_an_error_when_the_third_is_killed",
        ],
        NOT_TESTED,
    ),
    "simulation of many workers in one process": (
        ["test_simulation.py::test_256_learners"],
        NOT_THERE,
        [f"{KERAS2}simulation_agrees.py::test_a_simulation_trains_as_workers_do"],
        NOT_THERE,
    ),
}


def said(cell):
    """Returns the text of a cell of the table."""
    return cell if isinstance(cell, str) else "yes"


def named_in(cell):
    return [] if isinstance(cell, str) else cell
