{{/* "500m", 2 or "2.5" in thousandths of a core. */}}
{{- define "shoal.milli" -}}
{{- $text := include "shoal.text" . -}}
{{- if hasSuffix "m" $text -}}{{ trimSuffix "m" $text | int64 }}{{- else -}}{{ mulf (float64 $text) 1000 | ceil | int64 }}{{- end -}}
{{- end }}

{{/* "512Mi", "16Gi" or "1Ti" in MiB. */}}
{{- define "shoal.mebi" -}}
{{- $text := include "shoal.text" . -}}
{{- if hasSuffix "Ti" $text -}}{{ mulf (float64 (trimSuffix "Ti" $text)) 1048576 | ceil | int64 }}
{{- else if hasSuffix "Gi" $text -}}{{ mulf (float64 (trimSuffix "Gi" $text)) 1024 | ceil | int64 }}
{{- else -}}{{ trimSuffix "Mi" $text | int64 }}{{- end -}}
{{- end }}

{{/*
What all pods of a Ray cluster take at most: {cpu, memory, gpus, pods} as JSON. KubeRay's init container of workers takes
200m and 256Mi, and the larger of it and the container after it counts; the pod with which it clears Redis takes as much.
*/}}
{{- define "shoal.clusterTakes" -}}
{{- $cpu := add (include "shoal.milli" .Values.head.cpu) 0 -}}
{{- $memory := add (include "shoal.mebi" .Values.head.memory) 0 -}}
{{- $gpus := 0 -}}
{{- $pods := 1 -}}
{{- if .Values.autoscaler.enabled -}}
{{- $cpu = add $cpu (include "shoal.milli" .Values.autoscaler.cpu) -}}
{{- $memory = add $memory (include "shoal.mebi" .Values.autoscaler.memory) -}}
{{- end -}}
{{- if .Values.gcsFaultTolerance.enabled -}}
{{- $cpu = add $cpu 200 -}}
{{- $memory = add $memory 256 -}}
{{- $pods = add $pods 1 -}}
{{- end -}}
{{- range $name, $group := .Values.workers -}}
{{- if $group -}}
{{- $number := int $group.maxReplicas -}}
{{- $cpu = add $cpu (mul $number (max 200 (include "shoal.milli" $group.cpu | int64))) -}}
{{- $memory = add $memory (mul $number (max 256 (include "shoal.mebi" $group.memory | int64))) -}}
{{- $gpus = add $gpus (mul $number (int ($group.gpus | default 0))) -}}
{{- $pods = add $pods $number -}}
{{- end -}}
{{- end -}}
{{- dict "cpu" $cpu "memory" $memory "gpus" $gpus "pods" $pods | toJson -}}
{{- end }}

{{/* Requests and limits of a container that takes as much as it asks for: (dict "cpu" .. "memory" ..). */}}
{{- define "shoal.resources" -}}
requests:
  cpu: {{ include "shoal.text" .cpu | quote }}
  memory: {{ .memory | quote }}
limits:
  cpu: {{ include "shoal.text" .cpu | quote }}
  memory: {{ .memory | quote }}
{{- end }}
