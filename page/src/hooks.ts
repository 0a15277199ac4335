import { useCallback, useEffect, useRef, useState } from "preact/hooks"
import { ApiError, get, onEvents, recorded, type LiveEvent } from "./api"

export interface Loaded<T> {
    data: T | null
    error: ApiError | null
    /** Milliseconds that the last request took. */
    took: number
    again: () => void
}

/** Milliseconds after which a request is repeated that failed. */
export const RETRY = 3000
/** A request that takes longer than this is given up when it is to be repeated. */
const PATIENCE = 30_000

/** True if the same request may succeed later: the service does not answer, fails, or is busy. */
export const passes = (error: unknown) => !(error instanceof ApiError && error.status >= 400 && error.status < 500 && error.status !== 429)

/** The reply of a GET. The request is repeated when `again` is called, after an error that passes and, unless `every`
 * is 0, at least `every` milliseconds after each reply. Until the next reply arrives, the last one is returned. A call of
 * `again` during a request takes effect after the reply: else frequent calls would keep a slow reply away. */
export function useGet<T>(url: string | null, every = 0): Loaded<T> {
    const [state, set] = useState<{ url: string | null; data: T | null; error: ApiError | null; took: number }>({
        url: null, data: null, error: null, took: 0,
    })
    const [round, next] = useState(0)
    const call = useRef({ began: -Infinity, again: false }) // the request under way
    const again = useCallback(() => {
        if (performance.now() - call.current.began < PATIENCE) call.current.again = true
        else next((n) => n + 1)
    }, [])
    useEffect(() => {
        if (url === null) return
        const control = new AbortController()
        const now = (call.current = { began: performance.now(), again: false })
        let timer = 0
        const ended = (pause: number) => {
            now.began = -Infinity
            if (now.again) again()
            else if (pause && !recorded) timer = window.setTimeout(pass, pause)
        }
        get<T>(url, control.signal).then(
            (data) => {
                if (control.signal.aborted) return
                const took = performance.now() - now.began
                set({ url, data, error: null, took })
                ended(every && Math.max(every, took * 10))
            },
            (error) => {
                if (control.signal.aborted) return
                set((old) => ({ url, data: old.url === url ? old.data : null, error, took: 0 }))
                ended(passes(error) ? Math.max(every, RETRY) : 0)
            },
        )
        const pass = () => (document.hidden ? (timer = window.setTimeout(pass, 1000)) : again())
        return () => {
            control.abort()
            now.began = -Infinity
            clearTimeout(timer)
        }
    }, [url, round, every])
    const mine = state.url === url
    return { data: mine ? state.data : null, error: mine ? state.error : null, took: state.took, again }
}

/** Call `act` after events that `wanted` accepts, and after events that may have been missed, at most once in `pause`
 * milliseconds. */
export function useEvents(wanted: (event: LiveEvent) => boolean, act: () => void, pause = 700) {
    const now = useRef({ wanted, act })
    now.current = { wanted, act }
    useEffect(() => {
        let timer = 0
        const stop = onEvents((events) => {
            if (!timer && (events === null || events.some((event) => now.current.wanted(event))))
                timer = window.setTimeout(() => {
                    timer = 0
                    now.current.act()
                }, pause)
        })
        return () => {
            stop()
            clearTimeout(timer)
        }
    }, [pause])
}

export function useKeys(keys: Record<string, (event: KeyboardEvent) => void>) {
    const now = useRef(keys)
    now.current = keys
    useEffect(() => {
        const pressed = (event: KeyboardEvent) => {
            if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return
            const target = event.target as HTMLElement
            const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) && (target as HTMLInputElement).type !== "checkbox"
            if (typing && event.key !== "Escape") return
            if (event.key === "Enter" && /^(A|BUTTON|SUMMARY)$/.test(target.tagName)) return
            const act = now.current[event.key]
            if (act) {
                act(event)
                event.preventDefault()
            }
        }
        window.addEventListener("keydown", pressed)
        return () => window.removeEventListener("keydown", pressed)
    }, [])
}

export function useNarrow(): boolean {
    const [narrow, set] = useState(() => matchMedia("(max-width: 720px)").matches)
    useEffect(() => {
        const query = matchMedia("(max-width: 720px)")
        const changed = () => set(query.matches)
        query.addEventListener("change", changed)
        return () => query.removeEventListener("change", changed)
    }, [])
    return narrow
}

// --- the user's place in the page, from the URL: #/path?query

export interface Place {
    parts: string[]
    query: URLSearchParams
}
function here(): Place {
    const [before, after = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s)
    const parts = before.split("/").filter(Boolean).map((part) => {
        try {
            return decodeURIComponent(part)
        } catch {
            return part
        }
    })
    return { parts, query: new URLSearchParams(after) }
}
export function usePlace(): Place {
    const [place, set] = useState(here)
    useEffect(() => {
        const moved = () => set(here())
        window.addEventListener("hashchange", moved)
        return () => window.removeEventListener("hashchange", moved)
    }, [])
    return place
}
export function link(parts: string[], query: Record<string, string | undefined> | URLSearchParams = {}): string {
    const given = query instanceof URLSearchParams ? query : new URLSearchParams(
        Object.entries(query).filter((pair): pair is [string, string] => Boolean(pair[1])),
    )
    const text = given.toString()
    return `#/${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`
}
export const go = (url: string) => {
    location.hash = url
}
/** Change the place's query, without a new entry in the browser's history. */
export function setQuery(place: Place, changes: Record<string, string | undefined>) {
    const query = new URLSearchParams(place.query)
    for (const [name, value] of Object.entries(changes)) value ? query.set(name, value) : query.delete(name)
    history.replaceState(null, "", link(place.parts, query))
    window.dispatchEvent(new HashChangeEvent("hashchange"))
}
