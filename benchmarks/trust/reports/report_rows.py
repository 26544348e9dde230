"""What people reported in public, and attacks of our own: what happened, what assay says of it, and the tests that show it.

Every test is written anew from the report: the same fault, through the same command or function.
"""

from __future__ import annotations

from typing import NamedTuple

OWN = "attack of our own"
CONTROL = "control"


class Report(NamedTuple):
    """One report. tests: pytest node ids without `tests/`; that of a parametrized test stands for all of its cases."""

    kind: str
    """What happened, in a few words."""
    public_source: str
    expected: str
    """Of assay."""
    tests: tuple[str, ...]


_GATEWAYS = "evaluate/run/test_gateways.py::"
_NONE = f"{_GATEWAYS}test_replies_that_are_none_are_told_in_the_servers_words"
_ALIKE = "evaluate/serving_faults/test_gateways.py::"
_SCORED = "evaluate/divergence/test_judged.py::"
_ASKED = "evaluate/run/test_who_was_asked.py::"
_STRANGERS = "evaluate/run/test_strangers.py::"
_REPLIES = "evaluate/client/test_replies.py::"
_CLIENT = "evaluate/client/test_client.py::"
_RULES = "evaluate/serving_faults/test_rules.py::"
_IMPORT = "evaluate/speed/test_import_believed.py::"
_FAILED = f"{_IMPORT}test_failed_requests_of_vllm"
_PROBES = "evaluate/diagnosis/probes/test_lost_text.py::"
_EVIDENCE = "evaluate/asking/test_evidence.py::"
_TEXT = f"{_PROBES}test_text_that_is_not_what_its_ids_decode_to"
_EVERY = f"{_PROBES}test_what_is_done_to_every_reply_is_seen"
_CONTRADICT = f"{_PROBES}test_replies_that_contradict_themselves"
_HUB = "quantize/checkpoint/test_hub_cache.py::"
_LONG = "quantize/calibration/test_long_texts.py::"
_DAMAGES = "quantize/verify/test_damages.py::"


def _named(*modes: str) -> tuple[str, ...]:
    """Of scripted gateways, judged by the command line."""
    return tuple(f"{_ALIKE}test_what_a_gateway_changes_is_named[{mode}]" for mode in modes)


SERVERS = (
    Report(
        "Two honest servers, weights 0.01 nats apart", CONTROL, "PASS, under the gates of a suite that has none of its own",
        (f"{_SCORED}test_honest_servers_pass", f"{_ALIKE}test_healthy_servers_raise_nothing"),
    ),
    Report(
        "The gateway's fallback, or split traffic, answers for the candidate",
        "BerriAI/litellm #13486, #28241, #20177; odysseus-dev/odysseus #868",
        "NOT MEASURED: replies say that they are of another model",
        _named("healthy fallback", "healthy split", "healthy configuration"),
    ),
    Report(
        "The front of long prompts is dropped without a word",
        "ollama/ollama #17889, #17427; itayinbarr/little-coder #128; esengine/DeepSeek-Reasonix #10245",
        "NOT MEASURED: the same question had fewer prompt tokens; on both sides, fewer than were counted",
        _named("healthy trimmed lookup", "trimmed trimmed lookup"),
    ),
    Report(
        "The reasoning parser swallows the answer", "vllm-project/vllm #41902, #42635; ai-twinkle/Eval #23",
        "NOT MEASURED: thinking and no answer, the answer stands at its end: the parser, not the weights",
        _named("healthy swallowed"),
    ),
    Report(
        "A gateway caps replies and says `stop`, on both sides",
        "NousResearch/hermes-agent #108558; project-arbr/arbr-control-plane #34; UKGovernmentBEIS/inspect_ai #5189",
        "NOT MEASURED: replies end at exactly so many tokens without an answer",
        _named("capped capped", "healthy lowered"),
    ),
    Report(
        "HTTP 200 with `finish_reason: abort` and half a reply",
        "vllm-project/vllm #57082, #47933; sgl-project/sglang #2956", "no reply: asked again, NOT MEASURED above 1 %",
        (
            f"{_NONE}[aborted-HTTP 200 with finish_reason abort: the server did not finish the reply]",
            f"{_REPLIES}test_a_reply_that_was_not_finished_is_a_failed_request",
        ),
    ),
    Report(
        "Logits under the name of log-probabilities, on both sides",
        "vllm-project/vllm #9453, #37082; marella/ctransformers #166",
        "NOT MEASURED: log-probabilities above 0, and the option that makes them",
        (
            f"{_SCORED}test_logits_have_no_divergence",
            "evaluate/run/test_weights.py::test_logits_leave_divergence_unmeasured_and_the_remedy_is_no_other_checkpoint",
            "evaluate/divergence/test_what_is_no_logprob.py::test_logits_are_named_with_the_remedy",
        ),
    ),
    Report(
        "Stale log-probabilities of prompts in the prefix cache", "vllm-project/vllm #42019, #42245",
        "refused in one line: asked twice, its log-probabilities differ",
        (f"{_SCORED}test_rows_of_the_request_before_are_refused",),
    ),
    Report(
        "A cache replays samples, id and all, and they count as independent",
        "EleutherAI/lm-evaluation-harness #3839; UKGovernmentBEIS/inspect_ai #2580; promptfoo/promptfoo #360",
        "NOT MEASURED: replies are other ones over again; no interval, for these items either",
        _named("cached cached sampled", "cached cached sampled these_items", "healthy cached"),
    ),
    Report(
        "HTTP 200 with an error in place of a completion",
        "UKGovernmentBEIS/inspect_ai #1534; SWE-agent/mini-swe-agent #902",
        "NOT MEASURED in the provider's own words; code 429 is waited for as status 429",
        (
            f"{_NONE}[out_of_quota-HTTP 200 with an error in it (429): quota of 5 requests exceeded]",
            f"{_REPLIES}test_an_error_with_status_200",
            "evaluate/asking/test_signature.py::test_an_error_with_status_200_is_waited_for_as_its_code_says",
        ),
    ),
    Report(
        "`content` is a list of parts, thinking among them",
        "vercel/ai #13703; spring-projects/spring-ai #5019; NousResearch/hermes-agent #4748",
        "texts are joined, thinking is thinking; another shape ends the task after a few replies",
        (
            f"{_GATEWAYS}test_the_same_weights_pass[in_parts-thinks]", f"{_REPLIES}test_contents_in_parts",
            "evaluate/client/test_unreadable.py::test_a_task_of_nothing_else_is_asked_a_few_times",
        ),
    ),
    Report(
        "`completion_tokens` counts the prompt as well", "kserve/kserve #3712; ggml-org/llama.cpp #27318",
        "NOT MEASURED, and no reply is taken for a cut one: usage contradicts itself",
        (
            f"{_GATEWAYS}test_counts_that_cannot_be_are_not_taken_for_cuts", *_named("healthy miscounted"),
            f"{_REPLIES}test_counts_that_contradict_themselves_are_told_and_not_used",
        ),
    ),
    Report(
        "Usage of zeros", "tenstorrent/tt-inference-server #3552", "not stated: no count is 0",
        (f"{_REPLIES}test_counts_of_zero_are_none", f"{_CLIENT}test_a_count_of_no_tokens_is_none"),
    ),
    Report(
        "The loss lies in the tail: the likeliest five tokens are right, all others exchanged",
        "vllm-project/llm-compressor #2646; ikawrakow/ik_llama.cpp #325",
        "FAIL by the unbiased mean; the lumped lower bound passes nobody",
        (
            f"{_SCORED}test_a_tail_of_other_tokens_does_not_pass_for_its_likeliest",
            "evaluate/divergence/test_drift.py::test_what_lies_outside_the_list_is_not_passed_unseen",
        ),
    ),
    Report(
        "`temperature or 1.0`: zero counts as not given, on one side",
        "agno-agi/agno #988; FoundationAgents/OpenManus #642; QwenLM/Qwen #319",
        "NOT MEASURED: asked twice at temperature 0, other replies", _named("healthy falsy"),
    ),
    Report(
        "A gateway answers paths that it does not know with 200 and `{}`", OWN,
        "PASS: what is billed is counted, and no scoring is taken for offered; chats of `{}` are NOT MEASURED",
        (
            f"{_GATEWAYS}test_the_same_weights_pass[whole-whole]", f"{_CLIENT}test_an_address_where_nobody_answers_chats",
            f"{_CLIENT}test_a_gateway_that_answers_paths_that_it_does_not_know",
            f"{_NONE}[<lambda>-reply is not what the API promises: KeyError: 'choices'; received {{}}]",
        ),
    ),
    Report(
        "One text cannot be scored: the server is out of memory for it",
        "vllm-project/vllm #38830, #5907, #10325; EleutherAI/lm-evaluation-harness #2698",
        "left out and told, in the server's words; divergence NOT MEASURED above 1 in 10; the same when run again",
        (
            f"{_SCORED}test_a_text_that_the_reference_cannot_score_is_one_text",
            "evaluate/divergence/test_lost_texts.py::test_one_text_that_the_reference_cannot_score_is_left_out_and_told",
            "evaluate/divergence/test_lost_texts.py::test_many_texts_that_the_reference_cannot_score",
        ),
    ),
    Report(
        "NaN is said of numbers that are missing", OWN, "NaN is said of NaN alone",
        (
            "evaluate/asking/test_signature.py::test_why_there_is_none",
            f"{_REPLIES}test_log_probabilities_that_are_missing_are_not_taken_for_nan",
        ),
    ),
    Report(
        "Thinking is off, or another template is used, on one side",
        "0xBakeer/inference-atlas #209; noonghunna/club-3090 #747; jundot/omlx #358",
        "NOT MEASURED: all replies of one side have thinking, none of the other; prompts differ by 3 tokens on all questions",
        _named("thoughtless healthy", "healthy template"),
    ),
    Report(
        "`<think>` in the content, on one side", OWN, "PASS: thinking is thinking wherever it stands",
        (f"{_GATEWAYS}test_the_same_weights_pass[thinks_aloud-thinks]",),
    ),
    Report(
        "A page of the gateway in place of replies", OWN, "NOT MEASURED: one and the same text to many questions",
        _named("healthy page"),
    ),
    Report("A stop string that nobody sent", OWN, "NOT MEASURED: replies were ended by it", _named("healthy stopped")),
    Report("Temperature 0 is forced where samples are asked", OWN, "NOT MEASURED", _named("healthy forced sampled")),
    Report(
        "The server was repaired, or broke, after it was measured; a second run", "vllm-project/vllm #42635",
        "refused: it does not answer as it did; `--again LABEL` measures it anew",
        (
            f"{_ASKED}test_a_server_that_was_repaired_is_not_measured_already",
            f"{_ASKED}test_a_server_that_broke_later_is_not_measured_already",
        ),
    ),
    Report(
        "`finish_reason: end`, `TOOL_CALL`, `model_context_window_exceeded`, ...: ends of whole replies, by other words",
        "earendil-works/pi #2116; BerriAI/litellm #21348", "the reply ended, was cut off, or calls a tool",
        (f"{_REPLIES}test_a_reply_that_ended",),
    ),
    Report(
        "`completion_tokens` without the thinking: `length` at 6 of 256 tokens; `prompt_tokens` without what a cache gave",
        "UKGovernmentBEIS/inspect_ai #5528; project-arbr/arbr-control-plane #253; BerriAI/litellm #15270",
        "counted by the total, or not at all: no max_tokens was lowered, no reply is another prompt's",
        (f"{_REPLIES}test_what_prompt_and_completion_tokens_leave_out",),
    ),
    Report(
        "A cache that does not ask for the model gives the reference's replies, without id, name and counts",
        "zilliztech/GPTCache #61; BillionsBobby/JevRouter #35",
        "NOT MEASURED: replies name no model, while others of the server name one",
        (f"{_RULES}test_replies_that_name_no_model_where_the_server_does",),
    ),
    Report(
        "The same with new ids and a header that says so",
        "theopenco/llmgateway #3877; vllm-project/semantic-router #3423; tashfeenahmed/freellmapi #481; "
        "cloudflare/cloudflare-docs #15170",
        "NOT MEASURED: replies come from a cache, as their header says; a hit of the prefix cache is none",
        (
            f"{_RULES}test_replies_that_come_from_a_cache_by_their_headers",
            f"{_EVIDENCE}test_replies_from_a_cache_are_counted",
            f"{_REPLIES}test_a_header_of_a_cache_goes_with_the_reply",
            "evaluate/transport/test_connection.py::test_a_header_that_says_that_a_cache_answers",
        ),
    ),
    Report(
        "Batches change greedy replies of a mixture of experts, beside a reference that is batch-invariant",
        "vllm-project/vllm #23138; vllm-project/vllm-ascend #11317",
        "temperature 0 is obeyed: batches do no more than they do",
        (f"{_RULES}test_not_greedy",),
    ),
    Report(
        "A wrong name that begins as the right one does, in as many tokens", OWN, "a wrong answer, no lost text",
        (f"{_EVIDENCE}test_a_word_that_begins_as_the_references_is_not_cut",),
    ),
    Report(
        "Short replies that just fit into a short budget, and stop there", OWN, "no serving fault; they count as cut",
        (f"{_RULES}test_replies_that_just_fit_into_their_budget_stop_by_themselves",),
    ),
    Report(
        "A load balancer with two servers that call themselves otherwise", OWN,
        "refused: several servers answer at this address, or it changed; the address of one is asked for",
        ("evaluate/client/test_scheduling.py::test_a_server_started_anew_in_another_way_is_noticed",),
    ),
)  # fmt: skip
"""Evaluations of servers that run already."""

SPEEDS = (
    Report("A sound result of `vllm bench serve`", CONTROL, "a row that can be chosen", (f"{_FAILED}[256-0-None-None]",)),
    Report(
        "497 of 500 requests failed", "vllm-project/vllm #24005, #26478", "refused, with the share",
        tuple(
            f"{_FAILED}[{case}]"
            for case in (
                "3-497-497 of 500 requests failed (99.4 %)-is not believed: 497 of 500 requests failed (99.4 %)",
                "980-20-None-lost requests: 20 of 1,000 requests failed (2 %); more than 1 % are too many",
            )
        ),
    ),
    Report(
        "Requests were sent at a rate, and the limit stands as concurrency", "vllm-project/vllm #9390",
        "in flight as counted, the rate is noted, never chosen", (f"{_IMPORT}test_a_rate_is_no_concurrency",),
    ),
    Report(
        "16 prompts under a limit of 64", "vllm-project/vllm #9390", "at most 16 in flight, noted",
        (f"{_IMPORT}test_no_more_in_flight_than_prompts",),
    ),
    Report(
        "Results appended to one file, one of which contradicts itself", OWN,
        "each is read; the one that had more in flight than its limit is refused", (f"{_IMPORT}test_appended_results",),
    ),
    Report(
        "Tokens that were not counted", OWN, "never chosen: 2.1 in flight on average, not 64",
        (f"{_IMPORT}test_tokens_that_were_not_counted",),
    ),
    Report(
        "A throughput that tokens and seconds contradict", OWN, "refused",
        (f"{_IMPORT}test_throughput_that_tokens_and_seconds_contradict",),
    ),
    Report(
        "The file says `mtp: on`, the option says off", OWN, "refused: the file knows better",
        (f"{_IMPORT}test_a_file_knows_better_than_an_option",),
    ),
    Report(
        "Attention in data parallel, beside tensor parallel", OWN, "rows of their own, no repeats",
        (f"{_IMPORT}test_rows_that_are_no_repeats[data attention]",),
    ),
    Report("A time per token of 0", OWN, "not stated", (f"{_IMPORT}test_a_time_of_nothing_is_not_told",)),
    Report(
        "guidellm: 400 of 440 requests errored; 64 of 72 are incomplete", "vllm-project/guidellm #444, #519",
        "refused above a few per cent; never chosen above 1 %", (f"{_IMPORT}test_lost_requests_of_guidellm",),
    ),
    Report(
        "Rows of other precisions, splits, engines or models are merged as repeats", OWN,
        "rows of their own; one label for two checkpoints is refused; copies count once",
        (
            f"{_IMPORT}test_rows_that_are_no_repeats", f"{_IMPORT}test_a_label_is_of_one_checkpoint",
            f"{_IMPORT}test_copies_are_one_repeat", f"{_IMPORT}test_rates_of_guidellm_are_points_of_their_own",
        ),
    ),
    Report(
        "A server that lost 999 of 1,000 requests is a little faster, and chosen", OWN,
        "set aside, with the reason; of measured rows as well",
        (
            f"{_IMPORT}test_requests_that_a_server_lost_are_not_chosen", f"{_IMPORT}test_what_an_import_prints",
            "evaluate/speed/test_measure.py::test_requests_that_failed_are_told",
        ),
    ),
)  # fmt: skip
"""Speeds that others measured."""

PROBES = (
    Report("A healthy server is probed", CONTROL, "no alarm", (f"{_PROBES}test_a_clean_server_alarms_nothing",)),
    Report(
        "Text is cut, emptied, doubled or changed while its ids are whole", OWN,
        "alarm: it is not what its ids decode to; without ids, by log-probabilities, counts or the looks of the text",
        (_TEXT, f"{_PROBES}test_servers_without_ids"),
    ),
    Report(
        "Line ends and white space are changed in every reply", OWN, "alarm",
        tuple(f"{_EVERY}[{what}]" for what in ("white space", "a sign that is spelt out", "everything", "the last third")),
    ),
    Report(
        "Text, ids and counts end early; `length` says `stop`; usage is off; log-probabilities of another token", OWN,
        "alarm: the reply contradicts itself", (_CONTRADICT,),
    ),
    Report(
        "Replies to other requests", OWN, "alarm",
        (f"{_PROBES}test_replies_to_other_requests", f"{_PROBES}test_swapped_replies_of_texts_alone"),
    ),
    Report(
        "Temperature is forced", OWN, "alarm",
        (f"{_PROBES}test_a_temperature_that_is_forced", f"{_PROBES}test_a_higher_temperature"),
    ),
    Report(
        "An evaluation blames the weights for replies that a gateway swapped, cut or emptied", OWN,
        "NOT MEASURED: serving fault; a budget that says `stop` counts as cut",
        (
            *_named("healthy swapped", "healthy lost", "healthy emptied", "lost healthy"),
            f"{_RULES}test_cut_early_and_stop_at_the_budget", f"{_RULES}test_texts_of_others",
        ),
    ),
    Report(
        "Under `--same-weights` the journal answers for the candidate, which is never asked", OWN,
        "each label is asked by itself",
        (
            f"{_ASKED}test_with_the_same_weights_the_candidate_is_asked_too",
            f"{_ASKED}test_weights_of_one_folder_at_two_addresses_are_two_labels_even_without_the_option",
            f"{_ASKED}test_a_copy_of_the_reference_that_is_started_is_asked",
        ),
    ),
    Report(
        "A refused start takes the label", OWN, "the label is free", (f"{_ASKED}test_a_refused_start_binds_no_label",),
    ),
)  # fmt: skip
"""Servers and gateways that lose what they answer."""

FILES = (
    Report(
        "Targets of two config groups are exchanged: an assertion", OWN, "a damage, with the source and without",
        ("quantize/verify/test_verify.py::test_config_groups_that_are_exchanged",),
    ),
    Report(
        "A config that is nested hundreds deep: a traceback", OWN, "refused in one line, by every command",
        (
            "end_to_end/test_hostile.py::test_a_config_nested_as_deep_as_a_parser_goes", f"{_STRANGERS}test_a_config",
            "assay/test_files.py::test_numbers_and_depths_that_no_checkpoint_has",
        ),
    ),
    Report(
        "Numbers beyond 64 bits in recipes, options and results: a traceback", OWN, "refused in one line",
        (
            "cli/test_options.py::test_numbers_of_a_recipe_that_no_machine_counts",
            "cli/test_options.py::test_wrong_usage_is_one_line", f"{_IMPORT}test_hardware_of_many_digits",
            "assay/test_files.py::test_a_record_holds_no_number_beyond_64_bits",
        ),
    ),
    Report(
        "`--importance` of another model's weights is used", OWN, "refused; a file that does not say is noted",
        (
            "quantize/checkpoint/test_weights_identity.py::test_a_file_of_another_models_weights_is_refused",
            "quantize/checkpoint/test_weights_identity.py::test_quantize_refuses_it_and_says_where_a_file_says_nothing",
        ),
    ),
    Report(
        "A hub's ETag, commit or list of files names a path outside of the cache", OWN,
        "refused in one line, nothing is written", (f"{_HUB}test_no_header_names_a_path", f"{_HUB}test_no_list_names_a_path"),
    ),
    Report(
        "A hub sends other bytes of a data set than it states; its lists do not end", OWN, "refused, nothing is kept",
        (
            f"{_HUB}test_other_bytes_of_the_same_length_are_no_data", f"{_HUB}test_a_list_that_states_little_is_refused",
            f"{_HUB}test_the_commit_that_was_asked_for", f"{_HUB}test_a_list_has_an_end",
            f"{_HUB}test_a_list_of_too_many_files", f"{_HUB}test_pages_have_an_end",
        ),
    ),
    Report(
        "Calibrated weights with negated, exchanged and lost rows pass `verify --source`", OWN,
        "every damage is found, with forged digests as well; what GPTQ makes of odd weights is none",
        (
            f"{_DAMAGES}test_every_damage_of_calibrated_weights_is_found",
            "quantize/verify/test_calibrated_rows.py::test_every_damage_of_ordinary_weights_is_found_and_named",
            "quantize/verify/test_calibrated_rows.py::test_what_gptq_makes_of_odd_weights_is_no_damage",
        ),
    ),
    Report(
        "20 MB of `--text` take 4 GB", OWN, "read as far as it is needed; a line without end is refused; repeats are said",
        (
            f"{_LONG}test_a_long_text_is_tokenized_as_far_as_it_is_needed",
            f"{_LONG}test_a_line_that_never_ends_is_not_read_whole", f"{_LONG}test_sequences_that_repeat_are_counted_and_said",
        ),
    ),
    Report(
        "`recipe`, killed between its files, is refused for its own files", OWN, "goes on",
        ("pipeline/mixes/test_recipe.py::test_a_command_that_was_killed_between_its_files_goes_on",),
    ),
    Report(
        "What is published names folders of the machine", OWN, "left out; in files that are copied, noted",
        (
            "reports/publish/test_publish.py::test_nothing_that_is_published_names_a_folder_of_this_machine",
            "reports/publish/test_publish.py::test_a_copied_file_that_names_a_folder_is_noted",
        ),
    ),
    Report(
        "A calibration runs out of memory or disk hours after it began", OWN, "asked for before text is sampled",
        ("quantize/calibration/test_layerwise.py::test_room_is_asked_for_before_text_is_sampled",),
    ),
)  # fmt: skip
"""Files, hubs and interruptions."""

SECTIONS = {
    "Evaluations of servers": SERVERS,
    "Speeds that others measured": SPEEDS,
    "Servers and gateways that lose what they answer": PROBES,
    "Files, hubs and interruptions": FILES,
}
