// The parts of the control API's replies that the page reads (in the service: schemas.py, trajectory.py, timeline.py).

export interface ErrorRecord {
    boundary: string
    code: string
    message: string
    hint?: string | null
    field?: string | null
    log_tail?: string | null
    retryable?: boolean
}
export interface Verdict {
    reward: number
    metrics?: Record<string, number>
    reason?: string | null
    turns?: Record<string, number>
}
export interface Result {
    attempt: number
    stop_reason: string
    verdict?: Verdict | null
    error?: ErrorRecord | null
    harness_exit?: { code: number; log_tail: string } | null
    turns?: number
    forks?: Record<string, number>
    tokens?: Partial<Record<"sampled" | "trained" | "masked" | "dropped" | "unsure" | "drift", number>>
    seconds?: Partial<Record<string, number>>
    model_seconds?: number
    samples?: number
    labels?: Record<string, string>
    artifact_bytes?: number
    answer?: string | null
    ignored?: Record<string, number>
    failed_calls?: Record<string, number>
    frozen?: Record<string, { turns: number; tokens: number }>
}
export interface Session {
    id: string
    group_id: string
    sample_index: number
    state: string
    attempt: number
    node: string | null
    created: number
    updated: number
    last_error: ErrorRecord | null
    result: Result | null
}
export interface GroupFields {
    id: string
    state: string
    cancelled: boolean
    n: number
    priority: number
    created: number
    finished: number | null
    labels: Record<string, string>
    submitted_by?: string | null
    tenant?: string | null
}
export interface GroupSummary extends GroupFields {
    done: number
    errors: number
    mean_reward: number | null
}
export interface Group extends GroupFields {
    sessions: Session[]
}
export interface Part {
    type: string
    text?: string
    media_type?: string
    digest?: string
    url?: string | null
    size?: number
}
export interface Message {
    role: string
    content?: string
    reasoning?: string | null
    tool_calls?: { id: string; name: string; arguments: string }[]
    tool_call_id?: string | null
    name?: string | null
    parts?: Part[]
}
export interface Tokens {
    prompt_delta: number[]
    output_ids: number[]
    logprobs: number[]
    messages: Message[]
    reply: Message | null
    prompt_pieces?: string[] | null
    output_pieces?: string[] | null
}
export interface VersionSpan {
    version: number
    start: number
    end: number
}
export interface Turn {
    index: number
    parent: number | null
    step?: number
    model?: string | null
    join: string
    cause: string | null
    forked_from: number | null
    kind: string
    label: string
    depth: number
    prompt_tokens: number
    output_tokens: number
    context: string
    sampled: string
    finish: string
    mode: string
    dialect: string
    engine: string
    tool_calls: number
    malformed_calls: number
    cached_tokens: number | null
    drift_tokens: number
    versions: VersionSpan[]
    altered?: boolean
    ignored?: string[]
    timings: { received: number; first_token: number | null; finished: number }
    tokens?: Tokens | null
}
export interface Sample {
    row: number
    kind: string
    label: string
    turns: number[]
    ids: number[]
    loss_mask: number[]
    reward: number | null
}
export interface Span {
    kind: string
    name: string
    start: number
    end: number | null
    data: Record<string, any>
}
export interface Timeline {
    session_id: string
    attempt: number
    state: string
    now: number
    attempts: { attempt: number; began: number; ended: number | null; node: string | null; error: any }[]
    spans: Span[]
    left_out: Record<string, number>
}
export interface Artifacts {
    attempt: number | null
    artifacts: { path: string; size: number; sha256: string }[]
    left_out: { path: string; reason: string }[]
}
export interface Lane {
    name: string
    size: number
    in_use: number
    waiting: number
    served: number
    waited_seconds: number
}
export interface Engine {
    name: string
    kind: string
    serves: string | null
    url: string | null
    mode: string
    ok: boolean
    detail: string
    draining: boolean
    in_flight: number
    sessions: number
    generated_tokens: number
    failures: number
    suspect: string | null
    version: number
    advice?: string
}
export interface Status {
    version: string
    model: string
    sessions: Record<string, number>
    nodes: {
        name: string
        drained: boolean
        sessions: number
        capacity: number
        lanes: Lane[]
        resources: { cpus: number; cpus_set_aside: number; memory_mb: number; memory_mb_set_aside: number }
    }[]
    engines: Engine[]
    policy: { version: number; paused: string | null }
    failing: { name: string; node: string | null; count: number; error: string }[]
}
/** Failed sessions of a point are also counted as done. */
export interface Rates {
    now: number
    step_seconds: number
    points: Record<string, number>[]
}

export const failedCalls = (result: Result | null) => Object.values(result?.failed_calls ?? {}).reduce((sum, n) => sum + n, 0)
export const turnKey = (turn: { index: number; model?: string | null }) => `${turn.model ? `${turn.model}/` : ""}${turn.index}`
