"""Task evaluators by task name."""

from vbvr_bench.evaluators.slide import SlideDownEvaluator, SlideRightEvaluator

TASK_EVALUATOR_MAP = {
    "T-1_slide_square_right_data-generator": SlideRightEvaluator,
    "T-2_slide_square_down_data-generator": SlideDownEvaluator,
}
