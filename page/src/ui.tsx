import type { ComponentChildren } from "preact"
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks"
import { recorded, type ApiError } from "./api"
import { useKeys, type Loaded } from "./hooks"
import { failedCalls, type ErrorRecord, type Session } from "./model"
import { count, line, number, plural, visible } from "./text"

export const classes = (...names: (string | false | null | undefined)[]) => names.filter(Boolean).join(" ")

const TONES: Record<string, string> = {
    queued: "dim", initializing: "info", ready: "info", running: "live", evaluating: "info", active: "live",
    completed: "good", done: "good", cancelled: "dim", early_stop: "dim", expired: "warn", error: "bad",
    agent_timeout: "warn", session_timeout: "bad", max_turns: "warn", max_tokens: "warn", context_overflow: "warn",
    nonzero_exit: "warn", agent_excess: "warn",
}
export function Badge({ name, tone, title }: { name: string; tone?: string; title?: string }) {
    return <span class={`badge ${tone ?? TONES[name] ?? "dim"}`} title={title}>{visible(name).replace(/_/g, " ")}</span>
}
export const StateBadge = ({ session }: { session: Session }) => (
    <Badge name={session.state === "done" ? session.result?.stop_reason ?? "done" : session.state} />
)

/** The text about a session in a row: its error, or its failed model calls and the verdict's reason or the answer. */
export function What({ session, most }: { session: Session; most: number }) {
    const error = session.result?.error ?? session.last_error
    if (error) return <span class="bad-text" title={line(error.message, 400)}>{line(error.code, 60)}: {line(error.message, most)}</span>
    const failed = failedCalls(session.result)
    return <span class="dim">{failed > 0 && <Badge tone="warn" name={plural(failed, "failed call")} />} {line(session.result?.verdict?.reason ?? session.result?.answer ?? "", most)}</span>
}

export function Labels({ labels, most = 4 }: { labels: Record<string, string>; most?: number }) {
    const pairs = Object.entries(labels)
    return (
        <span class="labels">
            {pairs.slice(0, most).map(([name, value]) => recorded ? <span class="label" key={name}><span>{visible(name)}</span>{visible(value)}</span> : (
                <a class="label" key={name} href={`#/groups?label=${encodeURIComponent(`${name}=${value}`)}`}
                    title={visible(`${name}=${value}`)}>
                    <span>{visible(name)}</span>{visible(value)}
                </a>
            ))}
            {pairs.length > most && <span class="dim">+{pairs.length - most}</span>}
        </span>
    )
}

/** A number from 0 to 1 as a bar, with the number. */
export function Reward({ value }: { value: number | null | undefined }) {
    if (value === null || value === undefined) return <span class="reward none">–</span>
    const part = Math.max(0, Math.min(1, value))
    const tone = value >= 0.75 ? "good" : value <= 0.25 ? "bad" : "warn"
    return (
        <span class={`reward ${tone}`}>
            <span class="bar" aria-hidden="true"><i style={{ width: `${part * 100}%` }} /></span>
            <b>{number(value)}</b>
        </span>
    )
}

export function Progress({ done, of, bad = 0 }: { done: number; of: number; bad?: number }) {
    const whole = Math.max(1, of)
    return (
        <span class="progress">
            <span class="bar" aria-hidden="true">
                <i style={{ width: `${((done - bad) / whole) * 100}%` }} />
                <i class="bad" style={{ width: `${(bad / whole) * 100}%` }} />
            </span>
            <b>{done}/{of}</b>
        </span>
    )
}

export const STAGES = ["queued", "init", "ready", "run", "eval_wait", "eval", "stop"]
export function StageBar({ seconds, most }: { seconds: Partial<Record<string, number>>; most: number }) {
    const text = STAGES.filter((name) => seconds[name]).map((name) => `${name} ${seconds[name]!.toFixed(2)} s`).join(", ")
    return (
        <span class="stagebar" title={text} role="img" aria-label={text || "no stages"}>
            {STAGES.map((name) => (
                <i key={name} class={`stage-${name}`} style={{ width: `${((seconds[name] ?? 0) / Math.max(most, 1e-6)) * 100}%` }} />
            ))}
        </span>
    )
}

export function Panel({ title, aside, children, id, flush }: {
    title: ComponentChildren; aside?: ComponentChildren; children: ComponentChildren; id?: string; flush?: boolean
}) {
    return (
        <section class={classes("panel", flush && "flush")} id={id}>
            <header><h2>{title}</h2>{aside && <div class="aside">{aside}</div>}</header>
            <div class="body">{children}</div>
        </section>
    )
}

/** A region that scrolls sideways, also with the keyboard. */
export const Scroll = ({ label, children }: { label: string; children: ComponentChildren }) => (
    <div class="scroll" tabIndex={0} role="region" aria-label={label}>{children}</div>
)

export function Failed({ error, what }: { error: ApiError; what: string }) {
    if (error.notServed) return <p class="note">{what}: not served by this service.</p>
    if (error.status === 403) return <p class="note">{what}: this token may not read this. {visible(error.message)}</p>
    return (
        <div class="failed" role="alert">
            <b>{visible(error.message)}</b>
            {error.record.hint && <span>{visible(error.record.hint)}</span>}
        </div>
    )
}
export const Loading = ({ what }: { what: string }) => <p class="note" role="status">Loading {what} …</p>
/** What stands in place of data that are not there: why the request failed, or that it is under way. */
export const Missing = ({ reply, what }: { reply: Loaded<unknown>; what: string }) => (
    reply.error ? <Failed error={reply.error} what={what[0].toUpperCase() + what.slice(1)} /> : <Loading what={what} />
)
export const Empty = ({ children }: { children: ComponentChildren }) => <p class="note empty">{children}</p>

export function ErrorBox({ error, retried }: { error: ErrorRecord; retried?: boolean }) {
    return (
        <div class="errorbox">
            <p class="errorhead">
                <Badge name={error.boundary} tone="bad" /> <code>{visible(error.code)}</code>
                {retried && <span class="dim">the last attempt failed; the session is tried again</span>}
            </p>
            <p class="errortext">{visible(error.message)}</p>
            {error.field && <p class="dim">field: <code>{visible(error.field)}</code></p>}
            {error.hint && <p class="hint"><b>Hint</b> {visible(error.hint)}</p>}
            {error.log_tail && <LongText label="End of the log" text={error.log_tail} mono />}
        </div>
    )
}

const SHOWN = 12_000
/** A text of any length. Long texts are cut, and the rest is shown in pieces on request. */
export function LongText({ text, mono, label, from = 0 }: { text: string; mono?: boolean; label?: string; from?: number }) {
    const [most, set] = useState(SHOWN)
    const cut = text.length > most
    return (
        <div class={classes("longtext", mono && "mono")}>
            {label && <div class="caption">{label}</div>}
            <pre dir="ltr" tabIndex={cut || text.length > 2000 ? 0 : undefined} class={from ? "continued" : undefined}>
                {visible(cut ? text.slice(0, most) : text)}
            </pre>
            {cut && (
                <button type="button" class="quiet" onClick={() => set(most + 100_000)}>
                    show more ({count(text.length - most)} of {count(text.length)} characters are left)
                </button>
            )}
        </div>
    )
}

export async function copyText(text: string) {
    try {
        await navigator.clipboard.writeText(text)
    } catch {
        const area = document.createElement("textarea") // a page without TLS has no clipboard
        area.value = text
        document.body.append(area)
        area.select()
        document.execCommand("copy")
        area.remove()
    }
}
export function Copy({ text, children, title }: { text: () => string; children: ComponentChildren; title?: string }) {
    const [done, set] = useState(false)
    return (
        <button type="button" class="button" title={title} onClick={() => {
            void copyText(text()).then(() => {
                set(true)
                setTimeout(() => set(false), 1500)
            })
        }}>{done ? "Copied" : children}</button>
    )
}

export function Choice<T extends string>({ value, options, onChange, label }: {
    value: T; options: readonly (readonly [T, string])[]; onChange: (value: T) => void; label: string
}) {
    return (
        <div class="choice" role="group" aria-label={label}>
            {options.map(([name, text]) => (
                <button type="button" key={name} aria-pressed={value === name} onClick={() => onChange(name)}>{text}</button>
            ))}
        </div>
    )
}

export function Confirm({ children, act, question, harmless }: {
    children: ComponentChildren; act: () => Promise<unknown>; question: string; harmless?: boolean
}) {
    const [stage, set] = useState<"" | "ask" | "busy">("")
    const [fault, setFault] = useState("")
    const run = () => {
        set("busy")
        act().then(() => set(""), (error: Error) => { setFault(error.message); set("") })
    }
    if (stage === "") return (
        <>
            <button type="button" class={classes("button", !harmless && "danger")} onClick={() => { setFault(""); set("ask") }}>{children}</button>
            {fault && <span class="fault" role="alert">{visible(fault)}</span>}
        </>
    )
    return (
        <span class="confirm" role="group" aria-label={question}>
            <span>{question}</span>
            <button type="button" class={classes("button solid", !harmless && "danger")} disabled={stage === "busy"} onClick={run}>Yes, {children}</button>
            <button type="button" class="button" onClick={() => set("")}>No</button>
        </span>
    )
}

export interface Column<T> {
    name: string
    title?: string
    class?: string
    cell: (row: T) => ComponentChildren
}

/** A long list of rows of the same height, of which only the visible ones are in the document. */
export function LongList<T>({ rows, columns, keyOf, hrefOf, height, more, label, empty, grid }: {
    rows: readonly T[]; columns: Column<T>[]; keyOf: (row: T) => string; hrefOf: (row: T) => string; height: number
    more?: () => void; label: string; empty: ComponentChildren; grid: string
}) {
    const box = useRef<HTMLDivElement>(null)
    const [view, setView] = useState({ top: 0, height: 800 })
    const [active, setActive] = useState(-1)
    const shown = Math.ceil(view.height / height) + 12
    const first = Math.max(0, Math.min(Math.floor(view.top / height) - 6, rows.length - shown))
    const measure = () => box.current && setView({ top: box.current.scrollTop, height: box.current.clientHeight })
    useLayoutEffect(() => {
        measure()
        const observer = new ResizeObserver(measure)
        observer.observe(box.current!)
        return () => observer.disconnect()
    }, [])
    useEffect(() => {
        if (more && first + shown >= rows.length - 20) more()
    }, [first, shown, rows.length, more])
    const move = (to: number) => {
        const next = Math.max(0, Math.min(rows.length - 1, to))
        setActive(next)
        const at = next * height, { scrollTop, clientHeight } = box.current!
        if (at < scrollTop) box.current!.scrollTop = at
        else if (at + height > scrollTop + clientHeight) box.current!.scrollTop = at + height - clientHeight
    }
    useKeys({
        j: () => move(active + 1),
        k: () => move(active - 1),
        g: () => move(0),
        G: () => move(rows.length - 1),
        Enter: () => { if (rows[active]) location.hash = hrefOf(rows[active]) },
    })
    return (
        <div class="list" role="table" aria-label={label} aria-rowcount={rows.length + 1}>
            <div class="listhead" role="rowgroup">
                <div class="row" role="row" aria-rowindex={1} style={{ gridTemplateColumns: grid }}>
                    {columns.map((column) => (
                        <span role="columnheader" key={column.name} class={column.class} title={column.title}>{column.name}</span>
                    ))}
                </div>
            </div>
            <div class="listbody" ref={box} onScroll={measure} role="rowgroup" tabIndex={0} aria-label={label}>
                <div style={{ height: `${first * height}px` }} role="presentation" />
                {rows.slice(first, first + shown).map((row, at) => (
                    <div key={keyOf(row)} role="row" aria-rowindex={first + at + 2} style={{ gridTemplateColumns: grid, height: `${height}px` }}
                        class={classes("row", first + at === active && "active")}
                        onClick={(event) => {
                            if (!(event.target as HTMLElement).closest("a,button")) location.hash = hrefOf(row)
                        }}>
                        {columns.map((column) => (
                            <span role="cell" key={column.name} class={column.class} data-name={column.name}>{column.cell(row)}</span>
                        ))}
                    </div>
                ))}
                <div style={{ height: `${Math.max(0, rows.length - first - shown) * height}px` }} role="presentation" />
                {rows.length === 0 && <div role="row"><span role="cell">{empty}</span></div>}
            </div>
        </div>
    )
}

// --- one tooltip for the whole page, because thousands of tokens and spans cannot have an element each

let showTip: (tip: { x: number; y: number; rows: [string, string][]; head?: string } | null) => void = () => {}
export const tip = (event: MouseEvent, head: string, rows: [string, string][]) =>
    showTip({ x: event.clientX, y: event.clientY, rows, head })
export const noTip = () => showTip(null)
export function Tip() {
    const [now, set] = useState<Parameters<typeof showTip>[0]>(null)
    const box = useRef<HTMLDivElement>(null)
    showTip = set
    useLayoutEffect(() => {
        if (!now || !box.current) return
        const { width, height } = box.current.getBoundingClientRect()
        const x = Math.min(now.x + 12, innerWidth - width - 8)
        const y = now.y + 18 + height > innerHeight ? now.y - height - 10 : now.y + 18
        box.current.style.transform = `translate(${Math.max(4, x)}px, ${Math.max(4, y)}px)`
    }, [now])
    if (!now) return null
    return (
        <div class="tip" ref={box} role="tooltip">
            {now.head && <div class="tiphead">{now.head}</div>}
            <dl>{now.rows.map(([name, value]) => <div key={name}><dt>{name}</dt><dd>{value}</dd></div>)}</dl>
        </div>
    )
}
