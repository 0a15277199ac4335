// The lists of groups and of sessions, with filters that are in the URL.

import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks"
import { ApiError, get, recorded, withQuery } from "./api"
import { link, passes, RETRY, setQuery, useEvents, useKeys, useNarrow, type Place } from "./hooks"
import type { GroupSummary, Session } from "./model"
import { ago, clock, count, seconds } from "./text"
import { Badge, Failed, Labels, LongList, Progress, Reward, StateBadge, What, type Column } from "./ui"

interface Filter {
    name: string
    label: string
    kind: "text" | "number" | "choice" | "when"
    options?: string[]
    hint?: string
}
const WHEN: [string, string, number][] = [["10m", "10 minutes", 600], ["1h", "hour", 3600], ["1d", "day", 86400], ["7d", "week", 604800]]
const STATES = ["queued", "initializing", "ready", "running", "evaluating", "done"]
const REASONS = ["completed", "error", "cancelled", "early_stop", "expired", "max_turns", "max_tokens", "context_overflow", "agent_timeout", "session_timeout", "nonzero_exit", "agent_excess"]

function Filters({ place, filters, found }: { place: Place; filters: Filter[]; found: string }) {
    const first = useRef<HTMLInputElement>(null)
    useKeys({ f: () => first.current?.focus() })
    const set = (name: string, value: string) => setQuery(place, { [name]: value || undefined })
    const active = filters.filter((filter) => place.query.get(filter.name))
    return (
        <form class="filters" role="search" aria-label="Filters" onSubmit={(event) => event.preventDefault()}>
            {filters.map((filter, at) => {
                const value = place.query.get(filter.name) ?? ""
                const id = `filter-${filter.name}`
                return (
                    <label key={filter.name} for={id} class={`filter f-${filter.kind}`}>
                        <span>{filter.label}</span>
                        {filter.kind === "choice" || filter.kind === "when" ? (
                            <select id={id} value={value} onChange={(event) => set(filter.name, event.currentTarget.value)}>
                                <option value="">any</option>
                                {filter.kind === "when"
                                    ? WHEN.map(([key, text]) => <option key={key} value={key}>last {text}</option>)
                                    : filter.options!.map((each) => <option key={each} value={each}>{each.replace(/_/g, " ")}</option>)}
                            </select>
                        ) : (
                            <input id={id} ref={at === 0 ? first : undefined} value={value} placeholder={filter.hint}
                                inputMode={filter.kind === "number" ? "decimal" : undefined} autocomplete="off" spellcheck={false}
                                onChange={(event) => set(filter.name, event.currentTarget.value.trim())} />
                        )}
                    </label>
                )
            })}
            <span class="found" role="status">{found}</span>
            {active.length > 0 && (
                <button type="button" class="quiet" onClick={() => setQuery(place, Object.fromEntries(active.map((each) => [each.name, undefined])))}>
                    clear
                </button>
            )}
        </form>
    )
}

const since = (query: URLSearchParams) => {
    const long = WHEN.find(([key]) => key === query.get("since"))?.[2]
    return long ? Math.floor(Date.now() / 1000 - long) : undefined
}
const amount = (query: URLSearchParams, name: string) => {
    const value = query.get(name)
    return value === null || value === "" || isNaN(Number(value)) ? undefined : Number(value)
}
/** A label that the service can filter groups by: NAME=VALUE. */
const whole = (query: URLSearchParams) => (/^[^=]+=/.test(query.get("label") ?? "") ? query.get("label") : undefined)
const labelled = (labels: Record<string, string> | undefined, query: URLSearchParams) => {
    const [name, value] = (query.get("label") ?? "").split(/=(.*)/s)
    return !name || (labels !== undefined && (value === undefined ? name in labels : labels[name] === value))
}

interface Page<T> {
    rows: T[]
    after: string | null
}
/** What is known of a list: its rows, the cursor of its next page, and whether there is none. `late` is true if the first
 * page is to be read again after the request under way. */
interface State<T> {
    rows: T[]
    after: string | null
    whole: boolean
    busy: boolean
    late: boolean
    timer: number
}
const nothing = { after: null, whole: true, busy: false, late: false, timer: 0 }

/** Rows of a list, page by page. `read` is a new function when the filters change. */
function usePages<T>(read: (after: string | null) => Promise<Page<T>>, keyOf: (row: T) => string) {
    const [rows, set] = useState<T[]>([])
    const [error, setError] = useState<ApiError | null>(null)
    const [busy, setBusy] = useState(true)
    const state = useRef<State<T>>({ ...nothing, rows: [] }) // the effect below loads
    const load = useCallback(async (fresh: boolean, of: typeof read) => {
        const now = state.current
        if (now.busy) {
            now.late ||= fresh
            return
        }
        if (!fresh && now.after === null) return
        clearTimeout(now.timer)
        now.busy = true
        setBusy(true)
        let fault: unknown = null
        const page = await of(fresh ? null : now.after).catch((error) => void (fault = error))
        if (state.current !== now) return // the filters have changed meanwhile
        now.busy = false
        setBusy(false)
        setError(fault as ApiError | null)
        if (page) {
            if (fresh) renew(now, page, keyOf)
            else Object.assign(now, { rows: [...now.rows, ...page.rows], after: page.after, whole: page.after === null })
            set(now.rows)
        }
        if (now.late) {
            now.late = false
            void load(true, of)
        } else if (page && !page.rows.length) void load(false, of) // no row of this page matches: those of the next may
        else if (fault && passes(fault)) now.timer = window.setTimeout(() => void load(fresh, of), RETRY)
    }, [])
    useEffect(() => {
        const now = (state.current = { ...nothing, whole: false, rows: [] as T[] })
        set([])
        void load(true, read)
        return () => {
            clearTimeout(now.timer)
            state.current = { ...nothing, rows: [] }
        }
    }, [read])
    return {
        rows, error, busy, whole: state.current.whole,
        more: useCallback(() => void load(false, read), [read]), again: () => void load(true, read),
    }
}

/** Put the first page, which was read again, in place of the rows that it replaces. The rows of later pages stay, if the
 * page joins on to them. */
function renew<T>(now: State<T>, page: Page<T>, keyOf: (row: T) => string) {
    const end = page.rows.length ? keyOf(page.rows[page.rows.length - 1]) : null
    const at = page.after === null ? -1 : now.rows.findIndex((row) => keyOf(row) === end)
    if (at < 0) Object.assign(now, { rows: page.rows, after: page.after, whole: page.after === null })
    else now.rows = [...page.rows, ...now.rows.slice(at + 1)]
}

function found(list: { rows: unknown[]; error: unknown; busy: boolean; whole: boolean }, word: string): string {
    const n = list.rows.length
    if (!n && (list.busy || list.error)) return list.busy ? "loading …" : ""
    return `${count(n)}${list.whole ? "" : "+"} ${word}${n === 1 ? "" : "s"}`
}

const GROUP_FILTERS: Filter[] = [
    { name: "label", label: "Label", kind: "text", hint: "name=value" },
    { name: "state", label: "State", kind: "choice", options: ["active", "done"] },
    { name: "min_reward", label: "Reward from", kind: "number", hint: "0" },
    { name: "max_reward", label: "to", kind: "number", hint: "1" },
    { name: "since", label: "Created", kind: "when" },
]

export function Groups({ place }: { place: Place }) {
    const narrow = useNarrow()
    const key = place.query.toString()
    const read = useMemo(() => async (after: string | null) => {
        const query = place.query
        const params = {
            state: query.get("state"), label: whole(query), min_reward: query.get("min_reward"),
            max_reward: query.get("max_reward"), since: since(query), after, limit: 500,
        }
        const reply = await get<{ groups: GroupSummary[]; after?: string | null }>(withQuery("/v1/groups", params))
        const from = since(query) ?? 0, low = amount(query, "min_reward"), high = amount(query, "max_reward")
        // filter here as well, because an older service ignores filters that it lacks
        const rows = reply.groups.filter((group) =>
            (!query.get("state") || group.state === query.get("state")) && labelled(group.labels, query) && group.created >= from &&
            (low === undefined || (group.mean_reward ?? -Infinity) >= low) && (high === undefined || (group.mean_reward ?? Infinity) <= high))
        return { rows, after: reply.after ?? null }
    }, [key])
    const list = usePages<GroupSummary>(read, (group) => group.id)
    useEvents((event) => event.kind.startsWith("group.") || event.kind === "session.done", list.again, 1500)
    const columns: Column<GroupSummary>[] = [
        { name: "Group", class: "id", cell: (group) => <a href={link(["groups", group.id])}>{group.id}</a> },
        { name: "State", cell: (group) => <Badge name={group.cancelled ? "cancelled" : group.state} /> },
        { name: "Sessions", cell: (group) => <Progress done={group.done} of={group.n} bad={group.errors} /> },
        { name: "Mean reward", cell: (group) => <Reward value={group.mean_reward} /> },
        { name: "Labels", class: "wide", cell: (group) => <Labels labels={group.labels} most={3} /> },
        { name: "Took", class: "num", cell: (group) => seconds((group.finished ?? Date.now() / 1000) - group.created) },
        { name: "Created", class: "num dim", cell: (group) => <span title={clock(group.created)}>{ago(group.created)}</span> },
    ]
    return (
        <main class="full" id="main" tabIndex={-1}>
            <h1 class="hidden">Groups</h1>
            <Filters place={place} filters={GROUP_FILTERS} found={found(list, "group")} />
            {list.error && <Failed error={list.error} what="Groups" />}
            <LongList label="Groups" rows={list.rows} columns={columns} keyOf={(group) => group.id} more={list.more}
                hrefOf={(group) => link(["groups", group.id])} height={narrow ? 92 : 38}
                grid="minmax(11rem,1.1fr) 6.5rem 9.5rem 8.5rem minmax(8rem,2fr) 5.5rem 6.5rem"
                empty={list.busy || list.error ? "" : key ? "No group matches these filters." : "There are no groups yet. Submit one: outrider run TASK"} />
        </main>
    )
}

const SESSION_FILTERS: Filter[] = [
    { name: "text", label: "Text", kind: "text", hint: "errors, outputs, answers" },
    { name: "label", label: "Label", kind: "text", hint: "name=value" },
    { name: "state", label: "State", kind: "choice", options: STATES },
    { name: "stop_reason", label: "Ended by", kind: "choice", options: REASONS },
    { name: "error", label: "Error code", kind: "text" },
    { name: "harness", label: "Harness", kind: "text" },
    { name: "min_reward", label: "Reward from", kind: "number", hint: "0" },
    { name: "max_reward", label: "to", kind: "number", hint: "1" },
    { name: "since", label: "Since", kind: "when" },
]

export function Sessions({ place }: { place: Place }) {
    const narrow = useNarrow()
    const key = place.query.toString()
    const read = useMemo(() => async (after: string | null) => {
        const query = place.query
        const params = {
            text: query.get("text"), label: query.get("label"), state: query.get("state"), stop_reason: query.get("stop_reason"),
            error: query.get("error"), harness: query.get("harness"), min_reward: query.get("min_reward"),
            max_reward: query.get("max_reward"), since: since(query), after, limit: 200,
        }
        const low = amount(query, "min_reward"), high = amount(query, "max_reward")
        const wanted = (session: Session) => {
            const reward = session.result?.verdict?.reward
            return (!params.state || session.state === params.state) && (!params.stop_reason || session.result?.stop_reason === params.stop_reason) &&
                (!params.error || (session.result?.error ?? session.last_error)?.code === params.error) &&
                (low === undefined || (reward ?? -Infinity) >= low) && (high === undefined || (reward ?? Infinity) <= high)
        }
        const rows: Session[] = []
        for (let page = 0; page < 20; page++) {
            const reply = await get<{ sessions: Session[]; after: string | null }>(withQuery("/v1/sessions", params))
            rows.push(...reply.sessions.filter(wanted))
            params.after = reply.after
            if (reply.after === null || rows.length >= 50) break
        }
        return { rows, after: params.after }
    }, [key])
    const list = usePages<Session>(read, (session) => session.id)
    useEvents((event) => event.kind.startsWith("session.") || event.kind === "group.created", list.again, 1500)
    const columns: Column<Session>[] = [
        { name: "Session", class: "id", cell: (session) => <a href={link(["sessions", session.id])}>{session.id}</a> },
        { name: "State", cell: (session) => <StateBadge session={session} /> },
        { name: "Reward", cell: (session) => <Reward value={session.result?.verdict?.reward} /> },
        { name: "Turns", class: "num", cell: (session) => count(session.result?.turns) },
        { name: "Tokens", class: "num", cell: (session) => count(session.result?.tokens?.sampled) },
        { name: "Took", class: "num", cell: (session) => seconds((session.result ? session.updated : Date.now() / 1000) - session.created) },
        { name: "What", class: "wide", cell: (session) => <What session={session} most={120} /> },
        { name: "Updated", class: "num dim", cell: (session) => <span title={clock(session.updated)}>{ago(session.updated)}</span> },
    ]
    return (
        <main class="full" id="main" tabIndex={-1}>
            <h1 class="hidden">Sessions</h1>
            <Filters place={place} filters={SESSION_FILTERS} found={found(list, "session")} />
            {list.error && <Failed error={list.error} what="Sessions" />}
            <LongList label="Sessions" rows={list.rows} columns={columns} keyOf={(session) => session.id} more={list.more}
                hrefOf={(session) => link(["sessions", session.id])} height={narrow ? 92 : 38}
                grid="minmax(12rem,1.1fr) 8rem 7.5rem 4rem 5rem 5.5rem minmax(8rem,2.4fr) 6.5rem"
                empty={list.busy || list.error ? "" : key ? "No session matches these filters." : recorded ? "This file has no list." : "There are no sessions yet."} />
        </main>
    )
}
