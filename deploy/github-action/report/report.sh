#!/usr/bin/env bash
# Prints what the calls of the job have cost, and stops the gateway.
set -euo pipefail

folder=$RUNNER_TEMP/headgate
if ! [[ -e $folder/pid ]]; then
    echo "No gateway was started, so no call has cost anything."
    exit 0
fi
headgate=$folder/venv/bin/headgate
# The token of the job sees the job alone; the one in the data directory sees everything.
unset HEADGATE_TOKEN
usage() { "$headgate" usage --by model --url "$HEADGATE_URL" --data "$folder/data" "$@"; }

table=$(usage)
cost=$(usage --json | "$folder/venv/bin/python" -c '
import json, sys
print(json.load(sys.stdin)["total"]["usd"])
')
echo "$table"
echo "cost-usd=$cost" >> "$GITHUB_OUTPUT"
{
    echo "### Calls of models: \$$cost"
    echo '```'
    echo "$table"
    echo '```'
} >> "$GITHUB_STEP_SUMMARY"
kill "$(cat "$folder/pid")"
