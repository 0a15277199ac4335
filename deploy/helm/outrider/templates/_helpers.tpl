{{/*
The names of objects begin with RELEASE-service or RELEASE-nodes. A release's name has at most 53 characters, so no name
is cut off, and two releases of a namespace never have objects of the same name.
*/}}
{{- define "outrider.service" -}}{{ .Release.Name }}-service{{- end }}
{{- define "outrider.nodes" -}}{{ .Release.Name }}-nodes{{- end }}

{{- define "outrider.selector" -}}
app.kubernetes.io/name: outrider
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "outrider.labels" -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "outrider.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* The namespace of the sandboxes' pods. */}}
{{- define "outrider.podsNamespace" -}}
{{ dig "sandboxes" "kubernetes" "namespace" "" .Values.nodes.settings | default .Release.Namespace }}
{{- end }}

{{/* The service's address inside the cluster. */}}
{{- define "outrider.url" -}}
{{ ternary "http" "https" .Values.tls.insecure }}://{{ include "outrider.service" . }}.{{ .Release.Namespace }}.svc:8700
{{- end }}

{{/* An environment variable from a Secret: the existing one that `from` names, or `key` of the chart's own Secret. */}}
{{- define "outrider.secretVariable" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .from.existingSecret | default (include "outrider.service" .root) | quote }}
      key: {{ ternary .from.key .key (ne .from.existingSecret "") | quote }}
{{- end }}

{{/* A value as TOML, in one line. Strings, numbers and booleans are as in JSON. (Helm's toToml writes 64 as 64.0.) */}}
{{- define "outrider.tomlValue" -}}
{{- if kindIs "map" . -}}
{{- $fields := list -}}
{{- range $name, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $fields = append $fields (printf "%s = %s" (toJson $name) (include "outrider.tomlValue" $value)) -}}
{{- end -}}
{{- end -}}
{ {{- join ", " $fields -}} }
{{- else if kindIs "slice" . -}}
{{- $items := list -}}
{{- range . }}{{ $items = append $items (include "outrider.tomlValue" .) }}{{ end -}}
[{{ join ", " $items }}]
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end }}

{{/* A tree of settings as TOML, a line for each. Lists come first: below a section they would be part of it. */}}
{{- define "outrider.toml" -}}
{{- range $name, $value := . }}
{{- if kindIs "slice" $value }}
{{ $name }} = {{ include "outrider.tomlValue" $value }}
{{- end }}
{{- end }}
{{- range $name, $value := . }}
{{- if kindIs "map" $value }}

[{{ $name }}]
{{- range $field, $each := $value }}
{{- if not (kindIs "invalid" $each) }}
{{ $field }} = {{ include "outrider.tomlValue" $each }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* All engines of the settings, including those of frozen models, as a JSON list. */}}
{{- define "outrider.engines" -}}
{{- $engines := .Values.settings.engines | default list -}}
{{- range .Values.settings.frozen -}}{{- $engines = concat $engines (.engines | default list) -}}{{- end -}}
{{- toJson $engines -}}
{{- end }}

{{/* The ports at which engines are reached, as a JSON list. */}}
{{- define "outrider.enginePorts" -}}
{{- $ports := list -}}
{{- range include "outrider.engines" . | fromJsonArray -}}
{{- with .url -}}
{{- $url := urlParse . -}}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" -}}
{{- $ports = append $ports (int ($port | default (ternary "443" "80" (eq $url.scheme "https")))) -}}
{{- end -}}
{{- end -}}
{{- range .Values.networkPolicy.enginePorts -}}{{- $ports = append $ports (int .) -}}{{- end -}}
{{- toJson (uniq $ports | sortAlpha) -}}
{{- end }}

{{/* Checks that the schema cannot express. */}}
{{- define "outrider.check" -}}
{{- if not .Values.image.repository }}{{ fail "image.repository is missing: build deploy/Dockerfile, push it where the cluster can pull it, and name that" }}{{ end }}
{{- if and .Values.token.value .Values.token.existingSecret }}{{ fail "token.value and token.existingSecret are both given: give one" }}{{ end }}
{{- if not (or .Values.token.value .Values.token.existingSecret) }}{{ fail "a token is missing: give token.existingSecret, or token.value" }}{{ end }}
{{- if and .Values.store.value .Values.store.existingSecret }}{{ fail "store.value and store.existingSecret are both given: give one" }}{{ end }}
{{- if and .Values.callbackSecret.value .Values.callbackSecret.existingSecret }}{{ fail "callbackSecret.value and callbackSecret.existingSecret are both given: give one" }}{{ end }}
{{- if and .Values.tls.secretName .Values.tls.insecure }}{{ fail "tls.secretName and tls.insecure are both given: give one" }}{{ end }}
{{- if not (or .Values.tls.secretName .Values.tls.insecure) }}{{ fail "give tls.secretName, or say tls.insecure=true: then tokens cross the cluster's network in the clear" }}{{ end }}
{{- range include "outrider.engines" . | fromJsonArray }}
{{- if hasKey (.options | default dict) "api_key" }}{{ fail "settings.engines has an api_key, and settings are not secret: put OUTRIDER_ENGINES into a Secret and name it in service.envFromSecret" }}{{ end }}
{{- if regexMatch "^[a-z]+://[^/]*@" (.url | default "") }}{{ fail "the URL of an engine has a password, and settings are not secret: put OUTRIDER_ENGINES into a Secret and name it in service.envFromSecret" }}{{ end }}
{{- end }}
{{- if and (eq .Values.nodes.sandboxes "namespace") (semverCompare "<1.33.0-0" .Capabilities.KubeVersion.Version) }}{{ fail (printf "nodes.sandboxes=namespace needs Kubernetes 1.33 or newer (user namespaces of pods), and this is %s: set nodes.sandboxes=process-landlock, which isolates less" .Capabilities.KubeVersion.Version) }}{{ end }}
{{- end }}
