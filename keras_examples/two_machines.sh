#!/bin/bash
# Two machines with a worker each, by ssh: ./two_machines.sh host1 host2
# Both have this folder and this Python at the same paths, and ssh reaches them without a password.
set -eu
hosts="$1,$2"

for host in "$1" "$2"; do
    ssh -o BatchMode=yes "$host" "cd '$PWD' && gradcomp info"
done
gradcomp advise -H "$hosts" minimal.py  # does compression pay on this network?
gradcomp run -H "$hosts" --max-restarts 3 resume.py
