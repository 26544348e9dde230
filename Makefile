# assay: quantize a mixture-of-experts checkpoint, serve it, measure what was lost.
#
#   make quantize eval                      the small model of this repository, end to end, on any machine
#   make quantize eval MODEL=glm-5          a recipe of recipes/models/
#   make quantize eval MODEL=/path/to/it    a checkpoint folder; a Hugging Face id works too
#
#   MODEL       recipe name, checkpoint folder or hub id   (default tiny-glm)
#   PRECISIONS  what to make: "w4a16 nvfp4a16"             (default: the model's list)
#   PROFILE     how vLLM is run; see recipes/profiles/     (default: chosen from the hardware)
#   SUITE       what is measured; see recipes/suites/      (default: demo for tiny-glm, quick on CPUs, full otherwise)
#   WORKERS     threads of the quantizer                   (default: every core)
#   MEMORY      most memory the quantizer may use          (default: 2GiB)
#   IMPORTANCE  file of `assay calibrate`                  (default: made in the run where it is needed)
#   TEXT        text that is calibrated with: "a.jsonl@0.7 own@0.3"   (default: what the recipes say, else the model's own)
#   STREAM      hub: the source is never whole on the disk (default: it is downloaded first)
#   RUNS        folder of the results                      (default runs/)
#   PREFLIGHT   0: quantize eval begins without `assay preflight`
#   REPO        OWNER/NAME on the hub, for publish, which takes one of PRECISIONS

MODEL ?= tiny-glm
PRECISIONS ?=
PROFILE ?=
SUITE ?=
WORKERS ?=
MEMORY ?=
IMPORTANCE ?=
TEXT ?=
STREAM ?=
PREFLIGHT ?= 1
REPO ?=
RUNS ?= runs
PYTHON ?= python3

# The repository root holds a folder called evaluate/; it must never enter sys.path, where it would hide Hugging Face's package.
export PYTHONSAFEPATH := 1
export PYTHON

# Without this, a misspelt variable on the command line (MODLE=glm-5) would be ignored.
variables := MODEL PRECISIONS PROFILE SUITE WORKERS MEMORY IMPORTANCE TEXT STREAM RUNS PREFLIGHT REPO PYTHON
unknown := $(foreach name,$(filter-out $(variables) -*-command-variables-*-,$(.VARIABLES)),$(if $(filter command,$(origin $(name))),$(name)))
ifneq ($(strip $(unknown)),)
$(error $(strip $(unknown)): no such variable; known: $(variables))
endif

comma := ,
space := $(subst ,, )
assay := .venv/bin/assay
calibration := $(if $(IMPORTANCE),--importance "$(IMPORTANCE)") $(foreach source,$(TEXT),--text "$(source)")
stream := $(if $(STREAM),--stream-from $(STREAM))
first := $(if $(and $(filter quantize,$(MAKECMDGOALS)),$(filter eval,$(MAKECMDGOALS)),$(filter-out 0,$(PREFLIGHT))),preflight-first)
precisions := $(if $(strip $(PRECISIONS)),--precisions $(subst $(space),$(comma),$(strip $(PRECISIONS))))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup preflight preflight-first chosen-first quantize eval report card choose publish gate swe-demo swe-images doctor gpu-check speed test test-fast check lint docs bench bench-quantize full-count long-tests fuzz planted simulations choose-start soak alike lost-text sweep chaos damages clean calibrated-rows limits reports families-table screened meaning

help: ## show this text
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n '1,18p'
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: ## build both environments, if they are missing
	@missing=; $(MAKE) -qs .venv/.ready || missing=work; $(MAKE) -qs .venv-serve/.ready || missing="$$missing serve"; \
	test -z "$$missing" || constraints/install.sh check $$missing
	@$(MAKE) -s --no-print-directory .venv/.ready & work=$$!; $(MAKE) -s --no-print-directory .venv-serve/.ready; serve=$$?; \
	wait $$work && exit $$serve

.venv/.ready: constraints/work.hashes.txt constraints/build.hashes.txt constraints/install.sh pyproject.toml
	@constraints/install.sh work .venv
	@touch $@

.venv-serve/.ready: constraints/serve-cpu.hashes.txt constraints/serve-cuda.hashes.txt constraints/build.hashes.txt constraints/install.sh
	@constraints/install.sh serve .venv-serve
	@touch $@

.venv-docs/.ready: constraints/docs.hashes.txt constraints/build.hashes.txt constraints/install.sh
	@constraints/install.sh docs .venv-docs
	@touch $@

preflight: setup ## find out what would fail, before anything is downloaded or made
	@$(assay) preflight "$(MODEL)" $(precisions) $(if $(SUITE),--suite $(SUITE)) $(if $(PROFILE),--profile $(PROFILE)) $(stream) --runs "$(RUNS)"

# The first step of `make quantize eval`: nothing is written before it, and nothing is looked at once all is made and measured.
preflight-first: setup
	@$(assay) preflight "$(MODEL)" --first $(precisions) $(if $(SUITE),--suite $(SUITE)) $(if $(PROFILE),--profile $(PROFILE)) $(stream) --runs "$(RUNS)"

# Together with `eval`, both environments are built side by side; `quantize` alone needs only the first.
quantize: $(if $(filter eval test setup,$(MAKECMDGOALS)),setup,.venv/.ready) $(first) ## make and verify every precision of MODEL
	@$(assay) quantize "$(MODEL)" $(precisions) $(if $(PROFILE),--profile $(PROFILE)) $(if $(WORKERS),--workers $(WORKERS)) $(if $(MEMORY),--memory $(MEMORY)) $(calibration) $(stream) --runs "$(RUNS)"

eval: setup ## measure the reference and every candidate; write verdicts, report and cards
	@$(assay) evaluate "$(MODEL)" $(precisions) $(if $(SUITE),--suite $(SUITE)) $(if $(PROFILE),--profile $(PROFILE)) --runs "$(RUNS)"

swe-demo: .venv/.ready ## run a small SWE-bench with a scripted model, from agents to report; needs Docker
	@.venv/bin/python examples/tiny_swe/demo.py --runs "$(RUNS)"

swe-images: .venv/.ready ## build the repositories and images of suite swe-tiny; needs Docker
	@.venv/bin/python examples/tiny_swe/build_suite.py --images

gate: .venv/.ready ## judge again; fail unless every candidate is PASS
	@$(assay) gate "$(MODEL)" --runs "$(RUNS)"

# Together with `choose`, both are written after it, since they say what it found; together with `eval`, speeds are measured for it.
report: .venv/.ready $(if $(filter choose,$(MAKECMDGOALS)),chosen-first) ## write the report again, from the records
	@$(assay) report "$(MODEL)" --runs "$(RUNS)"

card: .venv/.ready $(if $(filter choose,$(MAKECMDGOALS)),chosen-first) ## write the model cards again, from the records
	@$(assay) card "$(MODEL)" --runs "$(RUNS)"

choose: chosen-first ## say which checkpoint to deploy at which number of streams, from measured speed and verdicts (docs/choosing.md)
	@:

chosen-first: .venv/.ready $(if $(filter eval,$(MAKECMDGOALS)),speed)
	@$(assay) choose "$(MODEL)" --runs "$(RUNS)"

publish: .venv/.ready ## upload the checkpoint of PRECISIONS to REPO on the hub, with card, manifest and report
	@test -n "$(strip $(REPO))" || { echo 'set REPO=OWNER/NAME, the repository to publish to' >&2; exit 2; }
	@$(assay) publish "$(MODEL)$(if $(strip $(PRECISIONS)),/$(strip $(PRECISIONS)))" "$(REPO)" --runs "$(RUNS)"

doctor: .venv/.ready ## say what this machine can do and what is missing
	@$(assay) doctor

speed: setup ## measure how fast each checkpoint of MODEL is served (docs/speed.md)
	@$(assay) speed "$(MODEL)" $(if $(PROFILE),--profile $(PROFILE)) --runs "$(RUNS)"

gpu-check: setup ## check on one GPU, in ten minutes, what only a GPU can show (docs/gpu-check.md)
	@$(assay) diagnose gpu-check

# Two at once and no more: either may hold a vLLM server or two. A module's tests share its server, so they stay together.
# Tests start assay hundreds of times, and where PYTHONDONTWRITEBYTECODE is set, as in many containers, each would compile it again.
compile := .venv/bin/python -m compileall -q assay quantize evaluate reports pipeline cli
test: setup .venv-docs/.ready ## run the tests, real vLLM servers included (35 minutes on two cores)
	@$(compile)
	@.venv/bin/python -m pytest -m "not full_count and not long" --numprocesses 2 --dist loadfile --no-loadscope-reorder

# The rest of the tests needs vLLM, Docker, a Ray cluster of its own, or minutes.
test-fast: .venv/.ready ## run the tests that need neither server nor container (three minutes)
	@$(compile)
	@.venv/bin/python -m pytest -m "not serve and not docker and not slow and not full_count" --numprocesses 2 --dist loadfile --no-loadscope-reorder

check: .venv/.ready ## run ruff, mypy and import-linter
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/lint-imports

lint: check ## same as check

# Its environment is small and made when it is needed; `make setup` leaves it out. The variable silences a note on mkdocs' future
# (docs/decisions/build.md, 159).
docs: .venv-docs/.ready ## build the documentation as a site, site/index.html; a warning is an error
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --quiet && echo "site/index.html"

bench: .venv/.ready ## run bench-quantize on small checkpoints, in a few minutes; print the results
	@.venv/bin/python benchmarks/run.py --small

bench-quantize: .venv/.ready ## compare with llm-compressor and cp, in 20 minutes; write benchmarks/RESULTS.md
	@.venv/bin/python benchmarks/run.py --results benchmarks/RESULTS.md

full-count: setup ## run what needs GLM-5 with all its layers, experts and shards, in six minutes; write benchmarks/full_count.txt
	@.venv/bin/python benchmarks/tests_apart.py full_count glm5_overhead.py glm5_preflight.py --write benchmarks/full_count.txt

long-tests: setup ## run the tests that take minutes each, in a quarter of an hour; write benchmarks/long_tests.txt
	@.venv/bin/python benchmarks/tests_apart.py long --write benchmarks/long_tests.txt

fuzz: .venv/.ready ## damage 10,000 files of every kind and read them, in some hours; write benchmarks/trust/fuzz.md
	@.venv/bin/python benchmarks/trust/fuzz.py --write benchmarks/trust/fuzz.md

planted: setup ## have real servers judge checkpoints with a known damage; each must fail by name, a copy must pass
	@.venv/bin/python benchmarks/verdicts/planted.py "$(RUNS)" --write benchmarks/verdicts/planted.md

simulations: .venv/.ready ## simulate uneven losses, attempts and drafts under the gates, in ten minutes; write benchmarks/verdicts/*.md
	@.venv/bin/python benchmarks/verdicts/uneven/few_clusters.py > benchmarks/verdicts/uneven/few_clusters.md
	@.venv/bin/python benchmarks/verdicts/uneven/subgroups.py > benchmarks/verdicts/uneven/subgroups.md
	@.venv/bin/python benchmarks/verdicts/uneven/lengths.py --runs 700 > benchmarks/verdicts/uneven/lengths.md
	@.venv/bin/python benchmarks/verdicts/attempts.py --runs 700 > benchmarks/verdicts/attempts.md
	@.venv/bin/python benchmarks/verdicts/paired_drafts.py --runs 1500 > benchmarks/verdicts/paired_drafts.md
	@.venv/bin/python benchmarks/verdicts/one_task_two_margins.py > benchmarks/verdicts/one_task_two_margins.md

choose-start: .venv/.ready ## simulate how far picks, chances and flips of `choose` may be believed, in minutes; write benchmarks/choice/choose_start.md
	@.venv/bin/python benchmarks/choice/choose_start.py --draws 170 --write benchmarks/choice/choose_start.md

limits: .venv/.ready ## simulate what limits on KL pass and fail, in minutes; write benchmarks/verdicts/divergence/{kl_limits,mix_split}.md
	@.venv/bin/python benchmarks/verdicts/divergence/kl_limits.py --draws 600 > benchmarks/verdicts/divergence/kl_limits.md
	@.venv/bin/python benchmarks/verdicts/divergence/mix_split.py --draws 2000 > benchmarks/verdicts/divergence/mix_split.md

soak: .venv/.ready ## ask 200,000 requests of a server that fails in every way, in five minutes; write benchmarks/trust/soak.md
	@.venv/bin/python benchmarks/trust/soak.py --write benchmarks/trust/soak.md

alike: setup ## simulate the rules on who answered what, and ask 20 real evaluations; write benchmarks/trust/alike.md
	@.venv/bin/python benchmarks/trust/alike.py --write benchmarks/trust/alike.md
	@.venv/bin/python benchmarks/trust/alike.py --real 20 --write benchmarks/trust/alike.md

lost-text: setup ## put gateways that lose and change text before a real vLLM, in half an hour; write benchmarks/trust/lost_text.md
	@.venv/bin/python benchmarks/trust/lost_text.py --write benchmarks/trust/lost_text.md

sweep: .venv/.ready ## let every call that changes the disk fail once, in 20 minutes; write benchmarks/trust/sweep.md
	@.venv/bin/python benchmarks/trust/sweep.py --write benchmarks/trust/sweep.md

chaos: setup ## disturb `quantize` and `eval` in every stage: kills, full disks, clocks, in 20 minutes; write benchmarks/trust/chaos.md
	@.venv/bin/python benchmarks/trust/chaos.py --warm --write benchmarks/trust/chaos.md

calibrated-rows: .venv/.ready ## round odd weights by GPTQ, and see that `assay verify` finds only their damages; write benchmarks/trust/calibrated_rows.md
	@.venv/bin/python benchmarks/trust/calibrated_rows.py --rounds 2 --write benchmarks/trust/calibrated_rows.md

reports: .venv/.ready ## run the tests that rebuild public reports and attacks, in minutes; write benchmarks/trust/reports.md
	@.venv/bin/python benchmarks/trust/reports/report_table.py --write benchmarks/trust/reports.md

screened: .venv/.ready ## screen the demo's checkpoints (after make quantize eval): beside what was served, intervals, rankings, kills; write benchmarks/screen/*.md
	@demo="$(RUNS)/tiny-glm"; here=benchmarks/screen; .venv/bin/python $$here/served.py $$demo fp8 > $$here/served.md
	@demo="$(RUNS)/tiny-glm"; here=benchmarks/screen; .venv/bin/python $$here/real_values.py $$demo $$demo/fp8/checkpoint $$demo/w4a16/checkpoint $$demo/w4a16-channel/checkpoint $$demo/nvfp4a16/checkpoint --write $$demo/screened/values.npz
	@here=benchmarks/screen; .venv/bin/python $$here/intervals.py "$(RUNS)/tiny-glm/screened/values.npz" > $$here/intervals.md
	@here=benchmarks/screen; .venv/bin/python $$here/kills.py examples/tiny_glm/checkpoint "$(RUNS)/tiny-glm/w4a16/checkpoint" > $$here/kills.md

meaning: setup ## serve and screen candidates of both small models: what a screening says of served KL and of tasks, in 40 minutes; write benchmarks/screen/{meaning,exact}.md
	@.venv/bin/python benchmarks/screen/meaning.py "$(RUNS)/meaning" --write benchmarks/screen/meaning.md
	@.venv/bin/python benchmarks/screen/exact.py "$(RUNS)/meaning" --write benchmarks/screen/exact.md

families-table: setup ## ask vLLM's loaders for GPUs about a model of every family, in minutes; write the table of docs/families.md
	@support=tests/support; PYTHONPATH=$$support/quantization:$$support/models:$$support/serving .venv/bin/python $$support/models/families_replayed.py

damages: .venv/.ready ## damage checkpoints in 640 ways and see that `assay verify` finds each; write benchmarks/trust/damages.md
	@.venv/bin/python benchmarks/trust/damage_table.py --write benchmarks/trust/damages.md

clean: ## remove build leftovers and caches; keep runs/ and the environments
	@rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache && find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
