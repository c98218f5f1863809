# TensorFlow for CPUs and tf_gradcomp, built for it:  docker build -t gradcomp .
FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /build
RUN pip install --no-cache-dir "tensorflow-cpu>=2.17,<2.22"
COPY pyproject.toml setup.py README.md LICENSE ./
COPY custom_ops custom_ops
COPY tf_gradcomp tf_gradcomp
RUN pip install --no-cache-dir . && gradcomp info

# Not the folder with the sources, which would hide the installed package.
WORKDIR /work
COPY keras_examples keras_examples
