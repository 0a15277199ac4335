import { useCallback, useEffect, useRef, useState } from "preact/hooks"
import { ApiError, get, onEvents, recorded, type LiveEvent } from "./api"

export interface Loaded<T> {
    data: T | null
    error: ApiError | null
    /** Milliseconds that the last request took. */
    took: number
    again: () => void
}

/** The reply of a GET. The request is repeated when `again` is called and, unless `every` is 0, at least `every`
 * milliseconds after each reply. Until the next reply arrives, the last one is returned. */
export function useGet<T>(url: string | null, every = 0): Loaded<T> {
    const [state, set] = useState<{ url: string | null; data: T | null; error: ApiError | null; took: number }>({
        url: null, data: null, error: null, took: 0,
    })
    const [round, next] = useState(0)
    const again = useCallback(() => next((n) => n + 1), [])
    useEffect(() => {
        if (url === null) return
        const control = new AbortController()
        const began = performance.now()
        let timer = 0
        get<T>(url, control.signal).then(
            (data) => {
                const took = performance.now() - began
                set({ url, data, error: null, took })
                if (every && !recorded) timer = window.setTimeout(pass, Math.max(every, took * 10))
            },
            (error) => {
                if (control.signal.aborted) return
                set((old) => ({ url, data: old.url === url ? old.data : null, error, took: 0 }))
                const gone = error instanceof ApiError && error.status >= 400 && error.status < 500
                if (every && !gone) timer = window.setTimeout(pass, Math.max(every, 3000))
            },
        )
        const pass = () => (document.hidden ? (timer = window.setTimeout(pass, 1000)) : again())
        return () => {
            control.abort()
            clearTimeout(timer)
        }
    }, [url, round, every])
    const mine = state.url === url
    return { data: mine ? state.data : null, error: mine ? state.error : null, took: state.took, again }
}

/** Call `act` after events that `wanted` accepts, at most once in `pause` milliseconds. */
export function useEvents(wanted: (event: LiveEvent) => boolean, act: () => void, pause = 700) {
    const now = useRef({ wanted, act })
    now.current = { wanted, act }
    useEffect(() => {
        let timer = 0
        const stop = onEvents((events) => {
            if (!timer && events.some((event) => now.current.wanted(event)))
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
            const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName)
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
