// The timeline of a session: stages, model calls, commands, processes and servers reached, as lanes on one clock, with zoom.

import { useEffect, useMemo, useRef, useState } from "preact/hooks"
import type { Session, Span, Turn } from "./model"
import { clock, count, line, seconds } from "./text"
import { noTip, tip } from "./ui"

const TITLES: [string, string][] = [["stage", "Stages"], ["sandbox", "Sandbox"], ["call", "Model calls"], ["failed_call", "Failed calls"], ["command", "Commands"], ["process", "Processes"], ["network", "Network"], ["error", "Errors"]]

/** The spans of a session without a recorded timeline: its stages one after another, and its model calls. */
export function fromTurns(session: Session, turns: Turn[]): Span[] {
    const spans: Span[] = []
    let at = session.created
    for (const name of ["queued", "init", "ready", "run", "eval_wait", "eval", "stop"]) {
        const long = session.result?.seconds?.[name] ?? 0
        if (long > 0) spans.push({ kind: "stage", name, start: at, end: at + long, data: {} })
        at += long
    }
    for (const turn of turns.filter((each) => each.timings.received > 0))
        spans.push({ kind: "call", name: turn.model ?? "", start: turn.timings.received, end: turn.timings.finished,
            data: { turn: turn.index, branch: turn.kind, label: turn.label, engine: turn.engine, prompt_tokens: turn.prompt_tokens,
                output_tokens: turn.output_tokens, cached_tokens: turn.cached_tokens, finish: turn.finish, first_token: turn.timings.first_token } })
    return spans
}

interface Lane {
    title: string
    kind: string
    rows: Span[][]
}
const MOST_ROWS = 12
function lanesOf(spans: Span[], now: number): Lane[] {
    const others = [...new Set(spans.map((span) => span.kind))].filter((kind) => !TITLES.some(([known]) => known === kind))
    return [...TITLES, ...others.map((kind) => [kind, line(kind, 20)])].flatMap(([kind, title]) => {
        const own = spans.filter((span) => span.kind === kind).sort((a, b) => a.start - b.start)
        if (!own.length) return []
        const rows: Span[][] = [], ends: number[] = []
        for (const span of own) {
            let row = ends.findIndex((end) => end <= span.start + 1e-6)
            if (row < 0) row = rows.length < MOST_ROWS ? rows.length : ends.indexOf(Math.min(...ends))
            ;(rows[row] ??= []).push(span)
            ends[row] = span.end ?? now
        }
        return [{ title, kind, rows }]
    })
}

const STEPS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400]

function toneOf(span: Span): string {
    if (span.kind === "stage") return `stage-${span.name}`
    if (span.kind === "call") return ({ subagent: "k-sub", compaction: "k-comp", auxiliary: "k-aux", unsure: "k-aux", retry: "k-retry", aborted: "k-retry", frozen: "k-frozen" } as Record<string, string>)[span.data.branch] ?? "k-main"
    if (span.kind === "error" || span.kind === "failed_call") return "bad"
    if (span.data.exit_code || (span.kind === "network" && (span.data.failed || span.data.refused))) return `${span.kind} failed-span`
    return span.kind
}

export function Timeline({ spans, now, live, choose, note, left }: {
    spans: Span[]; now: number; live: boolean; choose: (model: string, turn: number) => void; note?: string; left?: Record<string, number>
}) {
    const box = useRef<HTMLDivElement>(null)
    const [table, setTable] = useState(false)
    const lanes = useMemo(() => lanesOf(spans, now), [spans, now])
    const begin = Math.min(...spans.map((span) => span.start))
    const end = Math.max(begin + 0.01, live ? now : -Infinity, ...spans.map((span) => span.end ?? now))
    const [zoom, setZoom] = useState<[number, number] | null>(null) // seconds from the beginning
    const [drag, setDrag] = useState<[number, number] | null>(null)
    const whole = end - begin
    const [a, b] = zoom ?? [0, whole]
    const long = Math.max(b - a, 1e-4)
    const part = (at: number) => ((at - begin - a) / long) * 100
    const set = (from: number, to: number) => {
        const size = Math.min(Math.max(to - from, whole / 5000, 0.002), whole)
        const start = Math.max(0, Math.min(from, whole - size))
        setZoom(size >= whole * 0.999 ? null : [start, start + size])
    }
    const scale = (factor: number, middle = (a + b) / 2) => set(middle - (middle - a) * factor, middle + (b - middle) * factor)
    const atPointer = (event: MouseEvent) => {
        const area = box.current!.getBoundingClientRect()
        return a + ((event.clientX - area.left) / area.width) * long
    }
    const state = useRef({ scale, set, a, b, long, atPointer })
    state.current = { scale, set, a, b, long, atPointer }
    useEffect(() => {
        const wheel = (event: WheelEvent) => {
            const now = state.current
            if (event.ctrlKey || event.metaKey) {
                event.preventDefault()
                now.scale(event.deltaY > 0 ? 1.25 : 0.8, now.atPointer(event))
            } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
                event.preventDefault()
                const by = ((event.deltaX || event.deltaY) / 600) * now.long
                now.set(now.a + by, now.b + by)
            }
        }
        const area = box.current
        if (!area) return // the table is shown
        area.addEventListener("wheel", wheel, { passive: false })
        return () => area.removeEventListener("wheel", wheel)
    }, [table])
    const keys = (event: KeyboardEvent) => {
        const acts: Record<string, () => void> = {
            "+": () => scale(0.6), "=": () => scale(0.6), "-": () => scale(1.7), "0": () => setZoom(null),
            ArrowLeft: () => set(a - long * 0.2, b - long * 0.2), ArrowRight: () => set(a + long * 0.2, b + long * 0.2),
        }
        if (acts[event.key]) {
            acts[event.key]()
            event.preventDefault()
        }
    }
    const step = STEPS.find((each) => long / each <= (box.current && box.current.clientWidth < 500 ? 4 : 9)) ?? 86400
    const ticks: number[] = []
    for (let at = Math.ceil(a / step) * step; at <= b + 1e-9; at += step) ticks.push(at)
    const label = (at: number) => (step < 1 ? `${at.toFixed(step < 0.01 ? 3 : step < 0.1 ? 2 : 1)} s` : at < 120 ? `${Math.round(at)} s`
        : `${Math.floor(at / 60)}:${String(Math.round(at % 60)).padStart(2, "0")}`)
    const about = (span: Span): [string, string][] => {
        const rows: [string, string][] = [["at", `${(span.start - begin).toFixed(3)} s`], ["took", span.end === null ? `${seconds(now - span.start)}, under way` : seconds(span.end - span.start)]]
        for (const [name, value] of Object.entries(span.data)) {
            if (value === null || value === undefined || value === "" || (Array.isArray(value) && !value.length)) continue
            const text = name === "first_token" || name === "joined" || name === "stored" ? `after ${seconds(value - span.start)}` : typeof value === "number" ? count(value) : line(String(value), 200)
            rows.push([name.replace(/_/g, " "), text])
        }
        return rows
    }
    const name = (span: Span) => (span.kind === "call" ? `${span.name ? `${line(span.name, 30)} ` : ""}turn ${span.data.turn ?? "?"}` : line(span.name || span.kind, 120))
    const hover = (event: MouseEvent) => {
        const given = (event.target as HTMLElement).closest<HTMLElement>("[data-span]")?.dataset.span
        if (given === undefined) return noTip()
        const [lane, row, at] = given.split(".").map(Number)
        const span = lanes[lane]?.rows[row]?.[at]
        if (span) tip(event, name(span), about(span))
    }
    const cut = left ? Object.entries(left).filter(([, n]) => n) : []
    return (
        <div class="timeline">
            <div class="tools">
                <span class="dim">{clock(begin)} · {seconds(whole)}{live ? " so far" : ""}{note ? ` · ${note}` : ""}{cut.map(([kind, n]) => ` · ${n} more of kind ${kind} were not kept`)}</span>
                <span class="buttons">
                    <button type="button" class="button" aria-label="Zoom in" title="Zoom in (+)" onClick={() => scale(0.6)}>+</button>
                    <button type="button" class="button" aria-label="Zoom out" title="Zoom out (-)" onClick={() => scale(1.7)}>−</button>
                    <button type="button" class="button" title="The whole session (0)" disabled={!zoom} onClick={() => setZoom(null)}>all</button>
                    <button type="button" class="button" aria-pressed={table} onClick={() => setTable(!table)}>table</button>
                </span>
            </div>
            {table ? (
                <div class="scroll" tabIndex={0} role="region" aria-label="Timeline as a table">
                    <table class="plain">
                        <thead><tr><th>Kind</th><th>Name</th><th class="num">At</th><th class="num">Took</th><th>More</th></tr></thead>
                        <tbody>
                            {spans.map((span, at) => (
                                <tr key={at}><td>{span.kind}</td><td>{name(span)}</td><td class="num">{(span.start - begin).toFixed(3)} s</td>
                                    <td class="num">{span.end === null ? "under way" : seconds(span.end - span.start)}</td>
                                    <td class="dim">{about(span).slice(2).map(([key, value]) => `${key} ${value}`).join(" · ")}</td></tr>
                            ))}
                        </tbody>
                    </table>
                </div>
            ) : (
                <div class="lanes" tabIndex={0} role="group" aria-label="Timeline. Keys: plus, minus, arrows, 0" onKeyDown={keys} onMouseOver={hover} onMouseLeave={noTip}>
                    <div class="names" aria-hidden="true">
                        <div class="axis" />
                        {lanes.map((lane) => <div key={lane.kind} style={{ height: `${lane.rows.length * 20 + 8}px` }}>{lane.title}</div>)}
                    </div>
                    <div class="area" ref={box}
                        onMouseDown={(event) => { if (event.button === 0) { const at = atPointer(event); setDrag([at, at]); event.preventDefault() } }}
                        onMouseMove={(event) => drag && setDrag([drag[0], atPointer(event)])}
                        onMouseUp={() => {
                            if (drag && Math.abs(drag[1] - drag[0]) > long * 0.01) set(Math.min(...drag), Math.max(...drag))
                            setDrag(null)
                        }}
                        onDblClick={() => setZoom(null)}>
                        {ticks.map((at) => <span key={at} class="tick" style={{ left: `${((at - a) / long) * 100}%` }}><i>{(at - a) / long < 0.96 && label(at)}</i></span>)}
                        <div class="axis" />
                        {lanes.map((lane, l) => (
                            <div class="lane" key={lane.kind} style={{ height: `${lane.rows.length * 20 + 8}px` }}>
                                {lane.rows.map((row, r) => row.map((span, s) => {
                                    const from = part(span.start), to = part(span.end ?? now)
                                    if (to < 0 || from > 100) return null
                                    const left = Math.max(0, from), width = Math.min(100, to) - left
                                    const first = span.kind === "call" && span.data.first_token ? (part(span.data.first_token) - from) / Math.max(to - from, 1e-9) : 0
                                    return (
                                        <div key={`${r}.${s}`} data-span={`${l}.${r}.${s}`} class={`span ${toneOf(span)}${span.end === null ? " open" : ""}${span.kind === "call" ? " link" : ""}`}
                                            style={{ left: `${left}%`, width: `${width}%`, top: `${r * 20 + 4}px` }}
                                            onClick={span.kind === "call" && span.data.turn !== undefined ? () => choose(span.name, span.data.turn) : undefined}>
                                            {first > 0 && from >= 0 && <i class="waiting" style={{ width: `${Math.min(1, first) * 100}%` }} />}
                                            {width > 4 && <b>{span.kind === "call" ? span.data.turn ?? "" : line(span.name, 60)}</b>}
                                        </div>
                                    )
                                }))}
                            </div>
                        ))}
                        {drag && <div class="drag" style={{ left: `${((Math.min(...drag) - a) / long) * 100}%`, width: `${(Math.abs(drag[1] - drag[0]) / long) * 100}%` }} />}
                    </div>
                </div>
            )}
        </div>
    )
}
