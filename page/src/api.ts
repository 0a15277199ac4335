// Requests to the control API, with the user's token. A page of `outrider show --html` has recorded replies instead.

import type { ErrorRecord } from "./model"

type Recorded = { json: unknown } | { base64: string; type: string }
const island = document.getElementById("outrider-data")
/** The recorded replies by path, in a page of `outrider show --html`; otherwise null. */
export const recorded: { made: string; replies: Record<string, Recorded> } | null = island
    ? JSON.parse(island.textContent ?? "null")
    : null

export class ApiError extends Error {
    constructor(
        readonly status: number,
        readonly record: Partial<ErrorRecord> & { message: string },
    ) {
        super(record.message)
    }
    /** True if the service (an older one, or one without this part) or the recorded replies lack the route. */
    get notServed() {
        return this.status === 404 && /is not served here|not in this file/.test(this.message)
    }
}

const KEY = "outrider.token"
/** The service sends a comment every 15 seconds. A stream that is silent for longer counts as broken. */
const SILENCE = 45_000
const UNANSWERED = { message: "the service does not answer", hint: "is it running? The page tries again." }
const NO_JSON = { message: "the reply is not JSON", hint: "does a proxy reply in place of the service? The page tries again." }
let token = ""
try {
    token = sessionStorage.getItem(KEY) ?? ""
} catch {
    // without storage the token is kept in memory only
}
const waiting = new Set<(why: string) => void>()

export function onTokenNeeded(listener: (why: string) => void): () => void {
    waiting.add(listener)
    return () => waiting.delete(listener)
}
export const hasToken = () => token !== ""
export function setToken(given: string) {
    token = given.trim()
    try {
        if (token) sessionStorage.setItem(KEY, token)
        else sessionStorage.removeItem(KEY)
    } catch {
        // see above
    }
}

export type Params = Record<string, string | number | boolean | null | undefined>
export function withQuery(path: string, params: Params = {}): string {
    const query = new URLSearchParams()
    for (const [name, value] of Object.entries(params))
        if (value !== null && value !== undefined && value !== "" && value !== false) query.append(name, String(value))
    const text = query.toString()
    return text ? `${path}?${text}` : path
}
export const path = (...parts: (string | number)[]) => `/v1/${parts.map((part) => encodeURIComponent(part)).join("/")}`

async function request(url: string, init: RequestInit = {}): Promise<Response> {
    const headers = new Headers(init.headers)
    if (token) headers.set("Authorization", `Bearer ${token}`)
    let reply: Response
    try {
        reply = await fetch(url, { ...init, headers, credentials: "omit", cache: "no-store", redirect: "error" })
    } catch (error) {
        if ((error as Error).name === "AbortError") throw error
        throw new ApiError(0, UNANSWERED)
    }
    if (reply.ok) return reply
    let record: Partial<ErrorRecord> & { message: string } = { message: `the service replied with status ${reply.status}` }
    try {
        const given = await reply.json()
        if (typeof given?.message === "string") record = given
        else if (typeof given?.detail === "string") record = { message: given.detail }
    } catch {
        // not JSON: a proxy's reply
    }
    if (reply.status === 401) for (const listener of waiting) listener(record.message)
    throw new ApiError(reply.status, record)
}

/** Return what `reading` reads of a reply. A body that breaks off or is no JSON is an ApiError, as a missing reply is. */
async function whole<T>(reading: Promise<T>): Promise<T> {
    try {
        return await reading
    } catch (error) {
        if ((error as Error).name === "AbortError") throw error
        throw new ApiError(0, error instanceof SyntaxError ? NO_JSON : UNANSWERED)
    }
}

function answered(url: string): Recorded {
    const found = recorded!.replies[url.split("?")[0]]
    if (!found) throw new ApiError(404, { message: `${url.split("?")[0]} is not in this file` })
    return found
}

export async function get<T>(url: string, signal?: AbortSignal): Promise<T> {
    if (recorded) {
        const found = answered(url)
        if (!("json" in found)) throw new ApiError(404, { message: "not JSON" })
        return found.json as T
    }
    return whole((await request(url, { signal })).json())
}

export async function getBlob(url: string, signal?: AbortSignal): Promise<Blob> {
    if (recorded) {
        const found = answered(url)
        if (!("base64" in found)) throw new ApiError(404, { message: "no file" })
        return new Blob([Uint8Array.from(atob(found.base64), (char) => char.charCodeAt(0))], { type: found.type })
    }
    return whole((await request(url, { signal })).blob())
}

export const cancel = (url: string) => request(url, { method: "DELETE" })
export const post = (url: string, body: unknown = {}) =>
    request(url, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } })

// --- server-sent events, by fetch, because EventSource sends no headers

export interface LiveEvent {
    cursor: number
    kind: string
    group_id: string
    session_id: string | null
    data: Record<string, unknown>
}
/** Gets new events, or null if events may have been missed, because the page had no cursor to read on from. */
type Listener = (events: LiveEvent[] | null) => void
const listeners = new Set<Listener>()
const watchers = new Set<(live: boolean | null) => void>()
let streaming: AbortController | null = null
let last: number | null = null

export function onEvents(listener: Listener): () => void {
    listeners.add(listener)
    begin(false)
    return () => {
        listeners.delete(listener)
        if (!listeners.size) {
            streaming?.abort()
            streaming = null
        }
    }
}
/** Call `watcher` when the stream of events is connected (true), is interrupted (false), or is not served (null). */
export function onLive(watcher: (live: boolean | null) => void): () => void {
    watchers.add(watcher)
    return () => watchers.delete(watcher)
}
export function restartEvents() {
    streaming?.abort()
    streaming = null
    begin(false)
}
function begin(again: boolean) {
    if (!streaming && listeners.size && !recorded && !document.hidden) void stream(again)
}
// A browser has six connections to a service for all of its tabs together, so a tab that nobody sees has no stream.
document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
        streaming?.abort()
        streaming = null
    } else begin(true)
})

/** `again`: events may have been missed before, if the page has no cursor. */
async function stream(again: boolean) {
    const control = (streaming = new AbortController())
    for (let pause = 500; ; pause = Math.min(pause * 2, 15000), again = true) {
        const call = new AbortController()
        control.signal.addEventListener("abort", () => call.abort())
        let timer = 0
        const heard = () => {
            clearTimeout(timer)
            timer = window.setTimeout(() => call.abort(), SILENCE)
        }
        try {
            heard()
            const from = last === null ? { new: true } : { after: last }
            const reply = await request(withQuery("/v1/events", from), { signal: call.signal })
            for (const watcher of watchers) watcher(true)
            if (again && last === null) for (const listener of listeners) listener(null)
            pause = 500
            await read(reply, heard)
        } catch (error) {
            if (control.signal.aborted) return
            const status = error instanceof ApiError ? error.status : 0
            if (status === 401 || status === 404 || status === 403) {
                streaming = null
                if (status === 404) for (const watcher of watchers) watcher(null)
                if (status === 404) return
                break
            }
            if (status === 409) last = null
        } finally {
            clearTimeout(timer)
        }
        for (const watcher of watchers) watcher(false)
        await new Promise((done) => setTimeout(done, pause))
        if (control.signal.aborted) return
    }
    for (const watcher of watchers) watcher(false)
}

/** Pass the events of a stream on until its end. `heard` is called for everything that arrives. */
async function read(reply: Response, heard: () => void) {
    const reader = reply.body!.pipeThrough(new TextDecoderStream()).getReader()
    let rest = ""
    for (;;) {
        const { done, value } = await reader.read()
        if (done) return
        heard()
        const blocks = (rest + value).split("\n\n")
        rest = blocks.pop()!
        const found: LiveEvent[] = []
        for (const block of blocks)
            for (const row of block.split("\n")) if (row.startsWith("data: ")) found.push(JSON.parse(row.slice(6)))
        if (!found.length) continue
        last = found[found.length - 1].cursor
        for (const listener of listeners) listener(found)
    }
}
