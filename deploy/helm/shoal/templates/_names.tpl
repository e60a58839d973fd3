{{- define "shoal.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Labels of everything: by these it is found and removed. */}}
{{- define "shoal.labels" -}}
app.kubernetes.io/name: shoal
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Labels of one part beside Ray: (list $ "redis"). */}}
{{- define "shoal.partLabels" -}}
{{ include "shoal.labels" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "shoal.partSelector" -}}
app.kubernetes.io/name: shoal
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "shoal.runsClaim" -}}
{{ .Values.storage.runs.existingClaim | default (printf "%s-runs" .Release.Name) }}
{{- end }}

{{- define "shoal.datasetsClaim" -}}
{{ .Values.storage.datasets.existingClaim | default (printf "%s-datasets" .Release.Name) }}
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
