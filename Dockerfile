# Two images: `docker build --target training -t mmcare .` and `docker build --target runtime -t mmcare-runtime .`
# For PyTorch on CPUs: --build-arg TORCH='--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu torchvision==0.28.0+cpu'
FROM python:3.11-slim-bookworm AS training
RUN apt-get update && apt-get install -y --no-install-recommends git libgl1 libglib2.0-0 && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
ARG TORCH="torch===2.13.0 torchvision===0.28.0"
COPY requirements/constraints.txt /tmp/
RUN pip install 'setuptools>=77,<80.9' wheel && pip install -c /tmp/constraints.txt $TORCH numpy
# openmim asks for setuptools 60.2, which breaks it.
RUN pip install -c /tmp/constraints.txt --no-build-isolation mmcv-lite==2.1.0 \
    && pip install -c /tmp/constraints.txt openmim==0.3.9 mmengine==0.10.7 mmdet==3.3.0 mmsegmentation==1.2.2 mmpretrain==1.2.0 ftfy regex \
    && pip install 'setuptools>=77,<80.9'
COPY . /mmcare
RUN pip install --no-build-isolation /mmcare && python -m mmcare.mmcv_ext && python -c 'import mmdet, mmpretrain, mmseg, mmcare.engine'
# git reads no folder of another user, such as a mounted one, and a run's record then lacks its commit.
RUN git config --system safe.directory /workspace
WORKDIR /workspace

FROM python:3.11-slim-bookworm AS runtime
COPY requirements/constraints.txt /tmp/
RUN pip install --no-cache-dir -c /tmp/constraints.txt fastjsonschema numpy onnxruntime opencv-python-headless pillow
COPY mmcare_runtime /app/mmcare_runtime
ENV PYTHONPATH=/app
RUN python -m mmcare_runtime --help > /dev/null
ENTRYPOINT ["python", "-m", "mmcare_runtime"]
