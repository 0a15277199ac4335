# Written by `outrider slurm`. From here on it is the same for every job.
#
# This script runs on the first node of the allocation. It starts the service there, then one `outrider nodes join` on
# each node, and waits. Slurm ends it in two ways. Both leave everything that the service has accepted in its data:
#
#   USR1  some time before the time limit, to this script only: running sessions get time to end, and the job is queued
#         again if any sessions are left.
#   TERM  when the job is cancelled, preempted or queued again, to every process of the job, agents included: running
#         sessions are interrupted. Slurm itself decides whether to queue the job again.

set -euo pipefail

order=  # `limit` after USR1, `end` after TERM
trap 'order=${order:-limit}' USR1
trap 'order=end' TERM

say() { printf '%(%F %T)T outrider slurm: %s\n' -1 "$*"; }

# running PROCESS: true until this background process has ended. Reads the shell's list of jobs, because the number may
# belong to another process by now.
running() {
    local pid
    for pid in $(jobs -pr); do
        if [[ $pid == "$1" ]]; then return 0; fi
    done
    return 1
}

# A TERM to all processes of the job ends this `sleep`, too.
pause() { sleep "$1" || true; }

# ends PROCESS SECONDS: true if the process ends within this time
ends() {
    local until=$((SECONDS + $2))
    while running "$1"; do
        if ((SECONDS >= until)); then return 1; fi
        pause 0.5
    done
}

# stop_service SECONDS: sends TERM, a second TERM after SECONDS, and KILL 20 seconds later
stop_service() {
    if ! running "$service"; then return 0; fi
    kill -TERM "$service" || true
    if ends "$service" "$1"; then return 0; fi
    kill -TERM "$service" || true
    if ends "$service" 20; then return 0; fi
    kill -KILL "$service" || true
    ends "$service" 10 || true
}

# Removes this job's address, and `url` unless it already leads to that of another job.
remove_address() {
    rm -f "$folder/$address_file"
    if [[ $(readlink "$folder/url") == "$address_file" ]]; then rm -f "$folder/url"; fi
}

# Sends TERM to all steps of the job. A TERM to srun itself would kill the nodes.
stop_nodes() {
    if [[ ! $nodes ]] || ! running "$nodes"; then return 0; fi
    scancel --signal=TERM "$SLURM_JOB_ID" || true
    if ends "$nodes" 20; then return 0; fi
    kill -TERM "$nodes" || true
    ends "$nodes" 10 || true
}

# failed LOG TEXT: shows the end of the log and ends this job
failed() {
    say "$2; the end of $1:"
    tail -n 40 "$1" || true
    say "giving up; no accepted session is lost: the next job on this data folder continues"
    stop_service 20
    stop_nodes
    exit 1
}

# The program of each node: runs `outrider nodes join`, and starts it again when it fails.
node() {
    local order= failures=0 began child code
    trap 'order=1' TERM
    exec >>"$folder/node-$SLURMD_NODENAME.log" 2>&1
    export OUTRIDER_TOKEN
    OUTRIDER_TOKEN=$(<"$folder/token")
    while :; do
        began=$SECONDS
        "${join[@]}" --name "$SLURMD_NODENAME" "$url" &
        child=$! code=0
        wait "$child" || code=$?
        while kill -0 "$child" 2>/dev/null; do  # a signal ends `wait`
            code=0
            wait "$child" || code=$?
        done
        # Exit code 2 means an error that another start would repeat, such as a wrong setting.
        if [[ $order ]] || ((code == 0)); then exit 0; elif ((code == 2)); then exit 2; fi
        if ((SECONDS - began > 60)); then failures=0; fi
        failures=$((failures + 1))
        echo "outrider slurm: the node ended with exit code $code" >&2
        if ((failures == 10)); then exit 1; fi
        pause $((2 * failures))
        if [[ $order ]]; then exit 0; fi
    done
}

say "job $SLURM_JOB_ID, run $((${SLURM_RESTART_COUNT:-0} + 1)), nodes $SLURM_JOB_NODELIST"
mkdir -p "$folder"
if [[ ! -s $folder/token ]]; then
    say "there is no token in $folder/token: outrider slurm makes it when it writes the script"
    exit 1
fi
log=$folder/service.log ready=$folder/ready-$SLURM_JOB_ID address_file=url-$SLURM_JOB_ID
# `url` is a link to the file of the job that runs. So an earlier run of this job that was killed leaves no address, and
# a job that fails because another one uses the data folder does not remove the address of that one.
rm -f "$folder/$address_file"
trap 'rm -f "$ready"' EXIT
: >"$ready"
OUTRIDER_TOKEN=$(<"$folder/token") "${serve[@]}" >"$ready" 2>>"$log" &
service=$! nodes=

url= ran=0
while [[ ! $url && ! $order ]]; do
    if ! running "$service"; then failed "$log" "the service has ended before it was ready"; fi
    if ((SECONDS >= start_seconds)); then failed "$log" "the service was not ready after $start_seconds s"; fi
    pause 0.5
    url=$(sed -n 's/^outrider is ready at //p' "$ready") || true
done

if [[ ! $order ]]; then
    url=${url/'//0.0.0.0:'/"//$address:"}
    url=${url/'//[::]:'/"//$address:"}
    echo "$url" >"$folder/$address_file"
    ln -sf "$address_file" "$folder/url.new"
    mv "$folder/url.new" "$folder/url"
    trap 'rm -f "$ready"; remove_address' EXIT
    began=$SECONDS
    say "the service is ready at $url"
    # The end of one node does not end the others. The steps use all resources of the job, and may overlap.
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        ${cpus:+"--cpus-per-task=$cpus"} --mem=0 --cpu-bind=none --overlap --export=ALL --input=none \
        --kill-on-bad-exit=0 --wait=0 --no-kill \
        bash -c "$(declare -p folder url join; declare -f pause node); node" &
    nodes=$!
    while [[ ! $order ]] && running "$service" && running "$nodes"; do pause 1; done
    ran=$((SECONDS - began))
fi

if [[ $order == end ]]; then
    say "Slurm ends this job: what is under way is interrupted"
    pause 1  # The service has received TERM, too. After the second one, from `stop_service`, it waits for no session.
    stop_service 20
    if [[ $nodes ]]; then ends "$nodes" 20 || true; fi
    say "stopped"
    exit 143
fi
if [[ ! $order ]]; then
    if ! running "$service"; then failed "$log" "the service has ended"; fi
    code=0
    wait "$nodes" || code=$?
    if ((code)); then
        tail -n 20 "$folder"/node-*.log || true
        failed "$log" "all nodes have ended (exit code $code)"
    fi
    # If a preempted job has time to end, Slurm signals the nodes only.
    say "all nodes were told to end"
else
    say "the time limit is near"
fi

say "stopping: sessions under way have $stop_seconds s to end"
stop_service $((stop_seconds + 20))
remove_address
stop_nodes
left=$("${unfinished[@]}" 2>>"$log") || left=unknown
say "stopped; sessions that are left: $left"
if [[ $left == 0 ]]; then exit 0; fi
if [[ $order == end ]]; then exit 143; fi  # cancelled meanwhile
if ((ran < least_seconds && ${SLURM_RESTART_COUNT:-0} >= 3)); then
    # A job whose time is too short for any session would come back for ever.
    say "not queued again: the nodes ran for only $ran s; submit the job again, with more time"
    exit 1
fi
if ! scontrol requeue "$SLURM_JOB_ID"; then
    say "it could not be queued again: submit it again, on the same data folder"
    exit 1
fi
say "queued again"
