# Make searches for an interpreter. To choose one: make PYTHON=/path/to/python3.11 .venv
PYENV := $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions
BIN := .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
INSTALL = $(PIP) install -c requirements/constraints.txt
# Three equals signs, since two also allow a CPU build of PyTorch, which does not fit a torchvision
# from elsewhere (`operator torchvision::nms does not exist`). CPU builds, 192 MB in place of 3 GB, come as a pair from the
# index that pytorch.org names: make TORCH='--extra-index-url URL torch==2.13.0+cpu torchvision==0.28.0+cpu'
TORCH ?= torch===2.13.0 torchvision===0.28.0
# Written last, so that the next `make` continues an interrupted installation.
READY := .venv/.ready
# MMCV's own operators, compiled, in place of torchvision's.
MMCV_READY := .venv-mmcv/.ready
# The maintained forks of the MM family, next to the originals.
ONEDL_READY := .venv-onedl/.ready
# What most users of the MM family have, and the oldest versions that the core runs with.
OLD_READY := .venv-torch2.1/.ready
OLDEST_READY := .venv-torch2.0/.ready
# The core alone, on any Python.
CORE_READY := .venv-core/.ready
# mim and mmengine import pkg_resources, which setuptools 81 no longer has, and about which 80.9 warns in each process.
SETUPTOOLS := setuptools>=77,<80.9

# Make an environment with one of the versions $(1), unless it exists. The interpreter is PYTHON, one on
# the path (where a shim of pyenv may fail), or one in pyenv's folder.
HAS_VERSION = -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in "$(1)".split())' 2>/dev/null
define make_environment
	@$(BIN)/python $(HAS_VERSION) || { \
		for python in $(or $(PYTHON),$(foreach v,$(1),python$(v) $(wildcard $(PYENV)/$(v).*/bin/python))); do \
			$$python $(HAS_VERSION) && exec $$python -m venv --clear $(@D); \
		done; \
		echo 'Python $(subst $() , or ,$(1)) is needed: make PYTHON=/path/to/python $(@D)' >&2; exit 1; }
endef

.DEFAULT_GOAL := help
.PHONY: .venv .venv-mmcv .venv-onedl bench demo demo-seg dist docs help install lint phone test test-arm test-core \
	test-cuda test-export test-mmcv test-ncnn test-onedl test-onnx test-phone test-third-party test-slow test-torch2.0 test-torch2.1 typecheck

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' Makefile
	@test -e $(READY) || echo 'The first target that needs .venv downloads 3.5 GB, mostly PyTorch for CUDA.'

.venv: $(READY) ## set up the environment in .venv, if it is missing or out of date

install: $(READY) ## the same

.venv-mmcv: $(MMCV_READY) ## the same with MMCV compiled; needs gcc, and with a GPU also nvcc

.venv-onedl: $(ONEDL_READY) ## the same with the maintained forks of the MM family, compiled

$(READY) $(MMCV_READY): requirements/stack.txt
$(READY) $(MMCV_READY): STACK := requirements/stack.txt
$(READY): MMCV := mmcv-lite==2.1.0
$(MMCV_READY): MMCV := mmcv==2.1.0
$(MMCV_READY) test-mmcv: BIN := .venv-mmcv/bin
$(ONEDL_READY): requirements/stack-onedl.txt
$(ONEDL_READY): STACK := requirements/stack-onedl.txt
$(ONEDL_READY): MMCV := onedl-mmcv==2.3.6
$(ONEDL_READY) test-onedl: BIN := .venv-onedl/bin
# Without debugging information, compiling takes half the time.
COMPILE := MMCV_WITH_OPS=1 CFLAGS=-g0
define check_compilers
	@$(BIN)/python -c 'import torch; from torch.utils.cpp_extension import CUDA_HOME; \
		raise SystemExit(torch.cuda.is_available() and CUDA_HOME is None)' || { \
		echo 'MMCV would not compile: PyTorch sees a GPU, but there is no CUDA toolkit (nvcc). Install it,' \
		'or compile for the CPU alone: CUDA_VISIBLE_DEVICES=-1 make $(@D)' >&2; exit 1; }
	@echo '      Compiling takes 4 to 15 minutes, in which pip prints "still running"; pip keeps the wheel'
endef

$(READY) $(MMCV_READY) $(ONEDL_READY): Makefile pyproject.toml setup.py projects/phone/requirements.txt \
		$(addprefix requirements/,$(addsuffix .txt,bench constraints data export lint litert litert-nodeps ncnn runtime \
		tests timm))
	@echo 'Downloads 3.5 GB, most of it PyTorch with the libraries of CUDA.'
	@echo '[1/5] an empty environment in $(@D)'
	$(call make_environment,3.11 3.12 3.13)
	$(PIP) install --upgrade pip '$(SETUPTOOLS)' ninja psutil wheel
	@echo "[1/5] done at $$(date +%T)"
	@echo '[2/5] PyTorch: the largest download, about 3 GB'
	$(INSTALL) $(TORCH) numpy
	@echo "[2/5] done at $$(date +%T)"
	@echo '[3/5] MMCV: $(MMCV)'
	$(if $(findstring lite,$(MMCV)),,$(check_compilers))
	$(COMPILE) $(INSTALL) --no-build-isolation $(MMCV)
	@echo "[3/5] done at $$(date +%T)"
	@echo '[4/5] the MM toolboxes, and what exports, benchmarks, tests and linting need'
	$(INSTALL) -r $(STACK) -r requirements/data.txt -r requirements/tests.txt -r requirements/lint.txt \
		-r projects/phone/requirements.txt
	@echo '      setuptools again, since openmim pulls in 60.2. The red ERROR about openxlab, which wants'
	@echo '      that version, is harmless: nothing here runs openxlab'
	$(PIP) install '$(SETUPTOOLS)'
	@echo '      timm and the converter to ncnn, in their own call: otherwise pip would take another torch'
	$(INSTALL) -r requirements/timm.txt -r requirements/ncnn.txt
	@echo '      LiteRT, without transformers 5: with it installed, mmpretrain cannot be imported'
	$(PIP) install --no-deps -r requirements/litert-nodeps.txt
	@echo "[4/5] done at $$(date +%T)"
	@echo '[5/5] mmcare itself, editable'
	$(PIP) install --no-build-isolation --editable .
	$(if $(findstring lite,$(MMCV)),$(BIN)/python -m mmcare.mmcv_ext)
	@$(BIN)/python -c 'import mmcv.ops' || { \
		echo 'pip had kept an mmcv without ops, or one compiled against another torch. Type' >&2; \
		echo '$(BIN)/pip cache remove $(firstword $(subst ==, ,$(MMCV)));' \
		'$(BIN)/pip uninstall $(firstword $(subst ==, ,$(MMCV))); make $(@D)' >&2; exit 1; }
	@echo "[5/5] done at $$(date +%T); \`source $(BIN)/activate\` gives you its python and mim"
	@touch $@

$(OLD_READY) test-torch2.1: BIN := .venv-torch2.1/bin
$(OLD_READY): requirements/stack-torch2.1.txt requirements/tests.txt Makefile setup.py
	$(call make_environment,3.10)
	$(PIP) install --upgrade pip '$(SETUPTOOLS)' ninja psutil wheel
	$(PIP) install torch==2.1.2 torchvision==0.16.2 numpy==1.26.4
	$(PIP) install openmim==0.3.9 && $(PIP) install '$(SETUPTOOLS)'
	@echo "OpenMMLab's wheel of mmcv where it can be reached; otherwise compiling takes 4 to 12 minutes."
	@echo 'No cache: pip would install a wheel that it compiled against another torch'
	$(BIN)/mim install mmcv==2.1.0 --only-binary mmcv || $(COMPILE) $(PIP) install \
		--no-cache-dir --no-binary mmcv --no-build-isolation mmcv==2.1.0
	$(PIP) install -r requirements/stack-torch2.1.txt -r requirements/tests.txt
	$(PIP) install '$(SETUPTOOLS)'
	$(PIP) install --no-build-isolation --editable .
	$(BIN)/python -c 'import mmcv.ops'
	@touch $@

$(OLDEST_READY) test-torch2.0: BIN := .venv-torch2.0/bin
$(OLDEST_READY): requirements/stack-torch2.0.txt requirements/tests.txt Makefile setup.py
	$(call make_environment,3.8)
	$(PIP) install --upgrade pip 'setuptools<81' wheel
	$(PIP) install torch==2.0.1 -r requirements/stack-torch2.0.txt -r requirements/tests.txt
	$(PIP) install --no-build-isolation --editable .
	@touch $@

$(CORE_READY) test-core: BIN := .venv-core/bin
$(CORE_READY): requirements/tests.txt Makefile setup.py
	$(call make_environment,3.11 3.12 3.13 3.10 3.9)
	$(PIP) install --upgrade pip '$(SETUPTOOLS)' wheel
	$(PIP) install $(TORCH) 'mmengine<1' 'mmcv-lite<2.2' -r requirements/tests.txt
	$(PIP) install --no-build-isolation --editable .
	@touch $@

demo: $(READY) ## train Mask R-CNN CARE-S0 on generated scenes, into work_dirs/demo
	$(BIN)/python tools/demo.py coco

demo-seg: $(READY) ## the same for semantic segmentation
	$(BIN)/python tools/demo.py ade20k

bench: $(READY) ## measure latency next to the peers, into work_dirs/latency
	$(BIN)/python benchmarks/latency.py

# Always on the CPU, so that the outcome does not depend on the machine.
test test-core test-export test-mmcv test-ncnn test-onedl test-onnx test-phone test-third-party test-slow test-torch2.0 test-torch2.1: \
	export CUDA_VISIBLE_DEVICES := -1
# One thread for each process. The tests of a file run in one process, since they share fixtures.
test test-core test-export test-mmcv test-onedl test-phone test-torch2.0 test-torch2.1: export OMP_NUM_THREADS := 1
WORKERS := --numprocesses auto --dist loadfile
PARALLEL := -m 'not slow and not conversion' $(WORKERS)
PYTEST_FAST = $(BIN)/python -m pytest $(PARALLEL)

test: $(READY) ## run the tests without those below, and the code blocks of the pages
	$(PYTEST_FAST)

# Gigabytes of files go when their test has passed. Those of make test stay, since MMEngine writes into
# the folder of a process's first run.
test-export: $(READY) ## convert many models to all formats, and run the code blocks of two pages
	$(BIN)/python -m pytest -m 'conversion and not slow' $(WORKERS) -o tmp_path_retention_policy=failed

test-onedl: $(ONEDL_READY) ## run make test's tests on the maintained forks of the MM family, in .venv-onedl
	$(PYTEST_FAST)

test-mmcv: $(MMCV_READY) ## compare MMCV's operators with torchvision's, and test detectors on them
	$(BIN)/python -m pytest tests/test_mmcv_ext.py tests/test_configs.py tests/test_mm_hooks.py \
		tests/test_engine/test_bfloat16_ops.py $(PARALLEL)

test-torch2.1: $(OLD_READY) ## all tests but those of exports, with PyTorch 2.1 and Python 3.10
	$(BIN)/python -m pytest tests $(PARALLEL)

CORE_TESTS := $(addprefix tests/,test_models test_weights test_engine test_torch_tooling.py test_mm_hooks.py)
test-torch2.0: $(OLDEST_READY) ## the tests of models, weights and hooks with PyTorch 2.0 and Python 3.8
test-core: $(CORE_READY) ## the same with today's PyTorch, any Python, and without the toolboxes
test-core test-torch2.0:
	$(BIN)/python -m pytest $(CORE_TESTS) $(PARALLEL)

# The browsers' runtimes, in the versions of the lock file; npm runs none of their scripts.
RUNTIMES := projects/phone/node_modules

phone: $(RUNTIMES)/.ready ## install what the page for phones needs, with npm

$(RUNTIMES)/.ready: projects/phone/package-lock.json
	npm ci --ignore-scripts --no-audit --no-fund --prefix projects/phone
	@touch $@

test-phone: $(READY) $(RUNTIMES)/.ready ## test the page for phones, in Chromium
	$(BIN)/python -m pytest projects/phone

# Python for ARM and its libraries from Debian, runtimes from PyPI, and an emulator of the processor.
# All of it is unpacked below ARM; nothing is installed, so nobody has to be root.
ARM := .venv/arm
ARM_LIBRARIES := libc6 libexpat1 libffi8 libgcc-s1 libgomp1 libstdc++6 zlib1g
ARM_PYTHON := python3.11-minimal libpython3.11-minimal libpython3.11-stdlib $(ARM_LIBRARIES)
ARM_APT = apt-get -q -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Dir::State=$(abspath $(ARM)) \
	-o Dir::State::status=/dev/null -o Dir::Cache=$(abspath $(ARM))
ARM_RUNTIMES := ai-edge-litert|fastjsonschema|ml_dtypes|ncnn|numpy|onnxruntime|opencv-python

test-arm: $(READY) $(ARM)/.ready ## run exported files on ARM's instructions, emulated (on Debian)
	$(BIN)/python -m pytest tests/test_export/test_arm.py

$(ARM)/.ready: $(READY)
	rm -rf $(ARM)
	mkdir -p $(ARM)/lists/partial $(ARM)/archives/partial
	$(ARM_APT) update
	cd $(ARM) && $(ARM_APT) download $(ARM_PYTHON) && apt-get -q download qemu-user-static
	for package in $(ARM)/*.deb; do dpkg -x $$package $(ARM); done
	$(PIP) freeze | grep -E '^($(ARM_RUNTIMES))==' | sed s/opencv-python/opencv-python-headless/ > $(ARM)/runtimes.txt
	$(PIP) install --target $(ARM)/site --no-deps --only-binary :all: --python-version 3.11 \
		$(foreach glibc,17 24 27 28,--platform manylinux_2_$(glibc)_aarch64) -r $(ARM)/runtimes.txt
	@: 'Compiled for ARMv8.1: LiteRT loads this library if it exists, then stops on older processors.'
	rm $(ARM)/site/ai_edge_litert/libLiteRtWebGpuAccelerator.so
	@touch $@

# The oldest version that docs/boards.md names. It needs an older NumPy, so it has its own folder.
OLD_ORT := .venv/onnxruntime-1.15

# Whatever OpenVINO is installed checks int8 files; here, it is not in the environment of all tests.
OPENVINO := .venv/openvino

test-onnx: $(READY) $(OLD_ORT)/.ready $(OPENVINO)/.ready ## run exported files on the oldest ONNX Runtime that is supported, and in OpenVINO
	$(BIN)/python -m pytest tests/test_export/test_onnx.py -m slow

$(OPENVINO)/.ready: $(READY)
	rm -rf $(OPENVINO)
	$(PIP) install --no-deps --target $(OPENVINO) openvino==2026.4.1
	@touch $@

# The oldest version that docs/app.md names: earlier ones cannot read UperNet's pooling.
OLD_NCNN := .venv/ncnn-20250503

test-ncnn: $(READY) $(OLD_NCNN)/.ready ## run exported files on the oldest ncnn that is supported
	$(BIN)/python -m pytest tests/test_export/test_ncnn.py -m slow

$(OLD_NCNN)/.ready: $(READY)
	rm -rf $(OLD_NCNN)
	$(PIP) install --no-deps --target $(OLD_NCNN) ncnn==1.0.20250503
	@touch $@

$(OLD_ORT)/.ready: $(READY)
	rm -rf $(OLD_ORT)
	$(PIP) install --target $(OLD_ORT) onnxruntime==1.15.0 'numpy<2'
	@touch $@

test-cuda: $(READY) ## compare, train and resume on a GPU
	CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES:-0} $(BIN)/python -m pytest tests/test_cuda.py

test-slow: $(READY) ## run the slow tests
	$(BIN)/python -m pytest tests -m slow

# These run with Python 3.8; exports and analysis need a later Python.
CORE := mmcare/*.py $(addprefix mmcare/,classification engine models weights) mmcare_runtime setup.py \
	$(patsubst %,tools/%.py,convert_checkpoint make_sample_data reparameterize_model)

lint: $(READY) ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/vermin --quiet --no-tips --violations --exclude str.decode -t=3.8- $(CORE)

typecheck: $(READY) ## check type annotations
	$(BIN)/python -m mypy

# In folders of their own: they bring versions of requests and packaging that openmim's openxlab does
# not allow.
SPHINX := .venv/sphinx
RELEASE := .venv/release
# Without dependencies: the stack has them, and pip would install another torch. With transformers 5
# installed, mmpretrain 1.2 cannot be imported.
THIRD_PARTY := .venv/third-party

# In a folder of their own: mmpretrain cannot be imported next to the transformers of THIRD_PARTY.
MM_PROJECTS := .venv/mm-projects

test-third-party: $(READY) $(THIRD_PARTY)/.ready $(MM_PROJECTS)/.ready ## test CARE in other projects, on timm and on MMEngine
	PYTHONPATH=$(THIRD_PARTY) $(BIN)/python -m pytest tests/test_third_party.py docs/interfaces.md
	PYTHONPATH=$(MM_PROJECTS) $(BIN)/python -m pytest tests/test_mm_projects.py

docs: $(READY) $(SPHINX)/.ready ## build the documentation, into docs/_build/html
	PYTHONPATH=$(SPHINX) $(BIN)/python -m sphinx --fail-on-warning --keep-going docs docs/_build/html

dist: $(READY) $(RELEASE)/.ready ## build and check the sdist and the wheel, into dist
	rm -rf dist
	PYTHONPATH=$(RELEASE) $(BIN)/python -m build --no-isolation
	PYTHONPATH=$(RELEASE) $(BIN)/python -m twine check --strict dist/*

$(RELEASE)/.ready: $(READY) requirements/release.txt
	rm -rf $(RELEASE)
	$(PIP) install --target $(RELEASE) -r requirements/release.txt
	@touch $@

$(THIRD_PARTY)/.ready: $(READY) requirements/third-party.txt
	rm -rf $(THIRD_PARTY)
	$(PIP) install --no-deps --target $(THIRD_PARTY) -r requirements/third-party.txt
	@touch $@

$(MM_PROJECTS)/.ready: $(READY) requirements/mm-projects.txt
	rm -rf $(MM_PROJECTS)
	$(PIP) install --no-deps --target $(MM_PROJECTS) -r requirements/mm-projects.txt
	@: 'Compiled here: its wheels are for NumPy 1. This needs Cython, from the line above, and gcc.'
	PYTHONPATH=$(MM_PROJECTS) $(PIP) install --no-deps --target $(MM_PROJECTS) --no-build-isolation \
		--no-binary xtcocotools xtcocotools==1.14.3
	@touch $@

$(SPHINX)/.ready: $(READY) requirements/docs.txt
	rm -rf $(SPHINX)
	$(PIP) install --target $(SPHINX) -r requirements/docs.txt
	@touch $@
