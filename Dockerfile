# A peer (the entry point), and `bootstrap` and `simulate`, in one image without build tools.
#   docker build --tag panmesh .
# A bare "torch" on Linux is the CUDA build, gigabytes of it: TORCH_INDEX names where the CPU build
# is taken from. Empty: wherever pip looks anyway.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python3 -m venv /opt/panmesh
WORKDIR /src
# torch in a layer of its own: it is by far the largest and changes least.
COPY constraints.txt ./
RUN /opt/panmesh/bin/pip install --no-cache-dir --constraint constraints.txt \
    ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY peer peer
COPY bootstrap bootstrap
COPY simulations simulations
RUN /opt/panmesh/bin/pip install --no-cache-dir --constraint constraints.txt '.[prometheus]' \
    && /opt/panmesh/bin/pip uninstall --yes --quiet setuptools pip

FROM ${PYTHON_IMAGE}
RUN useradd --system --uid 10001 --no-create-home --home-dir /state panmesh \
    && install --directory --owner panmesh --group panmesh --mode 0700 /state /federation /authority
COPY --from=build /opt/panmesh /opt/panmesh
# One thread a peer: containers share the machine's cores, and one thread repeats bit by bit.
ENV PATH=/opt/panmesh/bin:$PATH \
    OMP_NUM_THREADS=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    MPLCONFIGDIR=/tmp/matplotlib
USER panmesh
WORKDIR /state
VOLUME /state
EXPOSE 7700 7701
ENTRYPOINT ["peer"]
CMD ["--help"]
