{{- define "shoal.image" -}}
{{- if contains "@" .Values.image.repository -}}
{{ .Values.image.repository | quote }}
{{- else -}}
{{ printf "%s:%s" .Values.image.repository (include "shoal.text" (.Values.image.tag | default .Chart.AppVersion)) | quote }}
{{- end -}}
{{- end }}

{{/* Labels of everything: by these it is found and removed. */}}
{{- define "shoal.labels" -}}
app.kubernetes.io/name: shoal
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Values.managedBy | default .Release.Service | quote }}
{{- end }}

{{/* Labels of Ray's pods, by which they are spread and let through; KubeRay has its own name for them. (list $ GROUP) */}}
{{- define "shoal.rayLabels" -}}
app.kubernetes.io/instance: {{ (index . 0).Release.Name | quote }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
shoal/group: {{ index . 1 | quote }}
{{- end }}

{{/* A text, a number or a flag as text: whole numbers of a values file are floats, and would be told as 1e+06. */}}
{{- define "shoal.text" -}}
{{- if and (kindIs "float64" .) (eq (float64 (int64 .)) .) }}{{ int64 . }}{{ else }}{{ toString . }}{{ end -}}
{{- end }}

{{/* A map whose values are texts, whatever they look like. */}}
{{- define "shoal.texts" -}}
{{- $texts := dict -}}
{{- range $name, $value := . }}{{ $_ := set $texts $name (include "shoal.text" $value) }}{{ end -}}
{{- toYaml $texts -}}
{{- end }}

{{/* Labels of one part beside Ray: (list $ "redis"). */}}
{{- define "shoal.partLabels" -}}
{{ include "shoal.labels" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "shoal.partSelector" -}}
app.kubernetes.io/name: shoal
app.kubernetes.io/instance: {{ (index . 0).Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "shoal.runsClaim" -}}
{{ .Values.storage.runs.existingClaim | default (printf "%s-runs" .Release.Name) | quote }}
{{- end }}

{{- define "shoal.datasetsClaim" -}}
{{ .Values.storage.datasets.existingClaim | default (printf "%s-datasets" .Release.Name) | quote }}
{{- end }}

{{/* Where what is beside Ray runs: with indentation, or nothing. */}}
{{- define "shoal.placement" -}}
{{- with .Values.placement.nodeSelector }}
nodeSelector:
  {{- include "shoal.texts" . | nindent 2 }}
{{- end }}
{{- with .Values.placement.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What PodSecurity "restricted" asks of a pod. (dict "user" UID) */}}
{{- define "shoal.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
fsGroup: {{ .user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* What it asks of a container, and a root file system that nobody writes to. */}}
{{- define "shoal.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Whether something is there already that this release has not made: what a whole Kubernetes cluster has once is made by
the first release, and used by the others. (list $ OBJECT) */}}
{{- define "shoal.isOfOthers" -}}
{{- $ := index . 0 -}}
{{- $object := index . 1 -}}
{{- if $object -}}
{{- $owner := ($object.metadata.annotations | default dict) -}}
{{- $isOwn := and (eq (get $owner "meta.helm.sh/release-name") $.Release.Name) (eq (get $owner "meta.helm.sh/release-namespace") $.Release.Namespace) -}}
{{- not $isOwn -}}
{{- end -}}
{{- end }}

{{- define "shoal.makesDcgm" -}}
{{- if and .Values.dcgm.enabled (not .Values.job.enabled) -}}
{{- ne (include "shoal.isOfOthers" (list . (lookup "apps/v1" "DaemonSet" .Values.dcgm.namespace "dcgm-exporter"))) "true" -}}
{{- end -}}
{{- end }}
