# Any Python 3.11 will do: make PYTHON=/path/to/python3.11 .venv
PYTHON ?= python3.11
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Written last: an installation that was interrupted is taken up again by the next `make`.
READY := .venv/.ready
# mim and mmengine import pkg_resources, which later versions of setuptools no longer have.
SETUPTOOLS := setuptools>=77,<81

.DEFAULT_GOAL := help
.PHONY: .venv demo demo-seg help install lint test test-slow

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

.venv: $(READY) ## set up the environment in .venv, if it is missing or older than what it is made of

install: $(READY) ## the same

$(READY): Makefile pyproject.toml requirements/lint.txt requirements/runtime.txt \
		requirements/stack.txt requirements/tests.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
		{ echo 'Python 3.11 is needed: make PYTHON=/path/to/python3.11 $@' >&2; exit 1; }
	@echo '[1/5] an empty environment in .venv'
	$(PYTHON) -m venv .venv
	$(PIP) install --upgrade pip '$(SETUPTOOLS)' ninja psutil wheel
	@echo '[2/5] torch (a large download)'
	$(PIP) install torch===2.13.0 torchvision==0.28.0 'numpy<2.4'
	@echo '[3/5] mmcv with its ops: compiling takes 7 to 12 minutes on two cores;'
	@echo '      pip keeps the wheel, so that the next environment has it within seconds'
	MMCV_WITH_OPS=1 $(PIP) install --no-build-isolation mmcv==2.1.0
	@echo '[4/5] the MM toolboxes, and what tests and linting need'
	$(PIP) install -r requirements/stack.txt -r requirements/tests.txt -r requirements/lint.txt
	@echo '      setuptools again, since openmim pulls in 60.2 (the remark about openxlab is harmless)'
	$(PIP) install '$(SETUPTOOLS)'
	@echo '[5/5] mmcare itself, editable'
	$(PIP) install --no-build-isolation --editable .
	@$(BIN)/python -c 'import mmcv.ops' || { \
		echo 'pip had kept an mmcv without ops, or one compiled against another torch. Type' >&2; \
		echo '$(BIN)/pip cache remove mmcv; $(BIN)/pip uninstall mmcv; make .venv' >&2; exit 1; }
	@touch $@

demo: $(READY) ## train Mask R-CNN CARE-S0 on generated scenes, into work_dirs/demo
	$(BIN)/python tools/demo.py coco

demo-seg: $(READY) ## the same for semantic segmentation
	$(BIN)/python tools/demo.py ade20k

# On the CPU anywhere, so that the outcome does not depend on the machine.
test test-slow: export CUDA_VISIBLE_DEVICES := -1

test: $(READY) ## run the tests, but for the slow ones
	$(BIN)/python -m pytest tests -m 'not slow'

test-slow: $(READY) ## run the slow tests
	$(BIN)/python -m pytest tests -m slow

lint: $(READY) ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
