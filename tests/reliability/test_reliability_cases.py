"""``cases.toml`` is complete, and what it names is there."""

import ast
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = tomllib.loads(Path(__file__).with_name("cases.toml").read_text("utf-8"))["case"]
IDS = """
disconnect_queued 01 02
disconnect_prefill 01 02
disconnect_decode 01 02 03 04 06 08
cancel_registration 01 02
abort_inflight_batch 01 02 03 04
overlap_extra_step 01
abort_api 01
n_gt_1 01 02
dup_request_id 01
zombie_session 01
unicode_split 01 02 03 06
detok_tail 01 02 03
detok_cost 01
leading_space 01
invalid_utf8_output 01
vocab_gap 01
stop_leak 01 02 03 06
stop_order 01 02 03
stop_tail 01
logprobs_align 01 02 03 06 07
terminal_event 01 02 03 06 07
empty_prompt 01
bos 01
context_limit 01 02
max_tokens 01 02
temperature 01 02
top_k_top_p 01 02
logit_bias 01
stop_token_ids 01
constraint_conflict 01
prompt_ids 01
input_bounds 01 02
seed 01
determinism 01 02 04
batch_state_leak 01 02
json_surrogate 01
json_deep 01 02 03 06
json_encoding 01 02
bad_messages 01
multimodal_parts 01
template_error 01
template_injection 01 02
special_tokens 01 02
tool_calls 01
grammar_dos 01 02 03
kv_exhaustion 01 02 03 04 07
kv_oversize 01
preemption 01 02
prefix_full_hit 01 02 03
same_step_hit 01 02 03
stale_hash 01 02
hash_collision 01
cache_timing 01
ghost_reply 01 02
chunk_edge 01 02
cuda_graph_pad 01 02 04
kv_leak 01 02
flush_while_live 01
host_leak 01
health 01 03
event_loop_block 01 02 03
tokenizer_threads 01
idle_cpu 01
shutdown_drain 01 02 03 04 07 08
gpu_error 01 02 03 04 06
queue_limits 01 03
slow_reader 01 02 03 06
idle_slowloris 01 02 03
half_close 01
http_pipeline 01 02 03
smuggling 01 02
zip_bomb 01
websocket 01 02 05
header_injection 01 03
metrics_cardinality 01
log_disk 01
log_ring 01
log_secrets 01
ssrf 01 02
cors_csrf 01 02
auth 01 02
path_traversal 01
asyncio_primitive 01 02 04
uvloop_fd 01
usage_accounting 01
"""
"""Each kind with the numbers of its cases."""


def test_every_case_is_answered_once() -> None:
    """No id is missing, doubled or made up; each has a test, or a reason why it cannot arise here."""
    expected = [
        f"rel-{kind}-{number}" for kind, *numbers in map(str.split, IDS.strip().splitlines()) for number in numbers
    ]

    assert len(expected) == 175
    assert sorted(case["id"] for case in CASES) == sorted(expected)
    assert all(case.keys() >= {"kind", "source"} and case.keys() & {"test", "reason"} for case in CASES)
    assert all(case["id"].startswith(f"rel-{case['kind']}-") for case in CASES)


def test_every_test_that_a_case_names_exists() -> None:
    """As a function of that name at the top of that file."""
    named = {case["test"] for case in CASES if "test" in case}

    assert {name for name in named if name.partition("::")[2] not in names_in(name.partition("::")[0])} == set()


@cache
def names_in(path: str) -> set[str]:
    """Names of the test functions in a file."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}
