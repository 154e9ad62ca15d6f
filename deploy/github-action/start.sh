#!/usr/bin/env bash
# Starts the gateway of one job with a budget, and tells the later steps its address and a token.
set -euo pipefail
umask 077

folder=$RUNNER_TEMP/headgate
mkdir "$folder"
if ! [[ $BUDGET_USD =~ ^[0-9]+(\.[0-9]+)?$ ]]; then
    echo "::error::budget-usd must be a number of dollars such as 2.50, not '$BUDGET_USD'"
    exit 2
fi
# A key that was not given must not look like one that is empty.
[[ -n ${ANTHROPIC_API_KEY:-} ]] || unset ANTHROPIC_API_KEY
[[ -n ${OPENAI_API_KEY:-} ]] || unset OPENAI_API_KEY

package=${PACKAGE:-$(dirname "$0")/../..}
echo "Installing Headgate from $package"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "$package"
headgate=$folder/venv/bin/headgate

if [[ -n ${SETTINGS:-} ]]; then
    cat "$SETTINGS" > "$folder/headgate.toml"
fi
cat >> "$folder/headgate.toml" <<END

[projects.job]

[budgets."project:job"]
limit_usd = "$BUDGET_USD"
END

# Programs of the job run on the same machine, so each of them has to show the token.
export HEADGATE_AUTH__REQUIRED=true
nohup "$headgate" up --config "$folder/headgate.toml" --data "$folder/data" --port "$PORT" --json \
    > "$folder/up.json" 2> "$folder/up.log" < /dev/null &
service=$!
echo "$service" > "$folder/pid"
until [[ -s $folder/up.json ]]; do
    if ! kill -0 "$service" 2> /dev/null; then
        echo "::error::the gateway did not start: $(tail -n 3 "$folder/up.log")"
        exit 1
    fi
    sleep 0.1
done

url=$("$folder/venv/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["address"])' < "$folder/up.json")
token=$("$headgate" token create job --project job --permission submit --permission read --expires 1d \
    --url "$url" --data "$folder/data")
echo "::add-mask::$token"
echo "url=$url" >> "$GITHUB_OUTPUT"
cat >> "$GITHUB_ENV" <<END
ANTHROPIC_BASE_URL=$url
ANTHROPIC_AUTH_TOKEN=$token
OPENAI_BASE_URL=$url/v1
OPENAI_API_KEY=$token
HEADGATE_URL=$url
HEADGATE_TOKEN=$token
END
echo "The gateway listens on $url. The calls of this job may cost \$$BUDGET_USD."
