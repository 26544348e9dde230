"""Tasks of one's own for lm-eval."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lm_eval_questions import ANSWERS


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for include_path: the filters and the metric of gsm8k_cot_zeroshot over six questions in a JSONL file."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": question, "answer": f"Think. #### {answer}"} for question, answer in ANSWERS.items()]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "local.yaml").write_text(
        f"""task: local_gsm8k
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "data.jsonl"}}}, cache_dir: {folder / "cache"}}}
output_type: generate_until
test_split: test
doc_to_text: "Q: {{{{question}}}}\\nA: Let's think step by step."
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
    ignore_punctuation: false
    regexes_to_ignore: [",", "\\\\$", "(?s).*#### ", "\\\\.$"]
generation_kwargs: {{until: ["Q:", "</s>"], do_sample: false}}
num_fewshot: 0
filter_list:
  - name: strict-match
    filter:
      - {{function: regex, regex_pattern: "The answer is (\\\\-?[0-9\\\\.\\\\,]+)."}}
      - {{function: take_first}}
  - name: flexible-extract
    filter:
      - {{function: regex, group_select: -1, regex_pattern: "(-?[$0-9.,]{{2,}})|(-?[0-9]+)"}}
      - {{function: take_first}}
"""
    )
    (folder / "graded.yaml").write_text(
        f"""task: local_graded
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "data.jsonl"}}}, cache_dir: {folder / "cache"}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
process_results: !function graded.half
metric_list: [{{metric: quality, aggregation: mean, higher_is_better: true}}]
"""
    )
    (folder / "graded.py").write_text("def half(doc, results):\n    return {'quality': 0.5}\n")
    (folder / "choice.yaml").write_text(
        f"""task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "data.jsonl"}}}, cache_dir: {folder / "cache"}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["1", "2"]
doc_to_target: 0
"""
    )
    (folder / "gone.yaml").write_text(
        f"""task: local_gone
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "gone.jsonl"}}}, cache_dir: {folder / "cache"}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
"""
    )
    return folder
