# syntax=docker/dockerfile:1
# CPU image:   docker build -t weft .
# CUDA image:  docker build -t weft:cuda --build-arg DEVICE=cuda .
# Run:         docker run --rm -p 8000:8000 --stop-timeout 45 weft            (the demo model)
#              docker run --rm -p 8000:8000 --stop-timeout 45 --gpus all -v /models:/models:ro weft:cuda /models/Llama-8B
#              --stop-timeout: --drain-timeout plus 15 s for processes to exit; Docker's default is 10 s
ARG PYTHON=3.12
ARG DEVICE=cpu

FROM python:${PYTHON}-slim AS build
ARG DEVICE
WORKDIR /src
RUN python -m venv /opt/weft
ENV PATH=/opt/weft/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Install torch first, so that code changes keep its layer. DEVICE=cpu installs the build without CUDA.
COPY constraints.txt ./
COPY tools/install tools/install
RUN python tools/install torch --device "$DEVICE"
COPY . .
RUN if [ "$DEVICE" = cuda ]; then extra="[gpu]"; else extra=""; fi && pip install -c constraints.txt ".$extra"

FROM python:${PYTHON}-slim AS runtime
ARG DEVICE
# Triton compiles its launchers with a C compiler at run time; Debian's version is fine.
# hadolint ignore=DL3008
RUN if [ "$DEVICE" = cuda ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi && \
    useradd --create-home --uid 10001 weft
COPY --from=build /opt/weft /opt/weft
ENV PATH=/opt/weft/bin:$PATH PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 WEFT_HOST=0.0.0.0
USER 10001
WORKDIR /home/weft
EXPOSE 8000
# Same as `weft health`, with a tenth of the import time. Reads port and TLS from flag, variable or file.
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-m", "weft.server.commands.health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["weft", "serve"]
